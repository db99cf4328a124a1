"""Elastic training with TensorFlow under its old name: `hora.keras.elastic`."""

from hora.keras.elastic import TensorFlowKerasState, TensorFlowState, run

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]
