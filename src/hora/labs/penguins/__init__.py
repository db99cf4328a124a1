"""The penguins lab, `hora demo penguins`: from raw data to a prediction, alone and distributed."""
