"""Graphs and sessions of tf.compat.v1, compared with numpy: collectives in any order on any number of threads,
their gradients, optimizers and broadcasts.
"""

from __future__ import annotations

import pytest

pytest.importorskip("tensorflow", reason="needs TensorFlow: make test-tensorflow")

import contextlib

import numpy as np
import tensorflow as tf
from tf_session import DTYPES, MOVED, check, raises, session

import horovod.tensorflow as hvd

pytestmark = pytest.mark.ranks(1, 2, 3)
v1 = tf.compat.v1


@contextlib.contextmanager
def graph(threads: int = 0):
    """Yield a session of a new graph."""
    config = v1.ConfigProto(inter_op_parallelism_threads=threads, intra_op_parallelism_threads=1)
    with tf.Graph().as_default(), v1.Session(config=config) as running:
        yield running


def initialise(running) -> None:
    running.run([v1.global_variables_initializer(), v1.local_variables_initializer()])


def total(value) -> float:
    return float(sum(value(rank) for rank in range(hvd.size())))


@session
def test_ranks_run_collectives_in_different_orders_on_one_thread():
    names = [f"c{i}" for i in range(6)]
    with graph(threads=1) as running:
        # Each one becomes ready after its predecessor: in this order on even ranks, in reverse on odd ranks.
        before, outputs = tf.ones([]), {}
        for name in names if hvd.rank() % 2 == 0 else reversed(names):
            before = tf.identity(before) * 1.0
            outputs[name] = hvd.allreduce(before, name=name, op=hvd.Sum)
        for _ in range(20):
            assert running.run([outputs[name] for name in names]) == [hvd.size()] * len(names)


@session
def test_a_collective_that_depends_on_another_does_not_block_a_third():
    with graph(threads=1) as running:
        a = hvd.allreduce(tf.ones([3]), name="a", op=hvd.Sum)
        b = hvd.allgather(a[:1], name="b")
        needed = b if hvd.rank() == 0 else tf.ones([hvd.size()]) * hvd.size()
        c = hvd.broadcast(needed, 0, name="c")
        for _ in range(10):
            np.testing.assert_array_equal(running.run([c, b, a])[0], [hvd.size()] * hvd.size())


@session
def test_one_tensor_in_several_collectives():
    with graph() as running:
        x = v1.placeholder(tf.float32, [100])
        outputs = [hvd.allreduce(x, op=hvd.Sum) for _ in range(4)]
        named = [hvd.allreduce(x, op=hvd.Average, name="same") for _ in range(3)]
        assert len({output.name for output in [*outputs, *named]}) == 7
        for _ in range(5):
            results = running.run([outputs, named], {x: np.ones(100)})
            for result in results[0]:
                np.testing.assert_array_equal(result, np.full(100, hvd.size()))
            for result in results[1]:
                np.testing.assert_array_equal(result, np.ones(100))


@session(sets=True)
def test_every_collective_in_a_session(sets):
    for process_set in sets:
        mine, ranks = process_set.ranks.index(hvd.rank()), process_set.ranks
        size = len(ranks)
        for dtype in DTYPES:
            with graph() as running:
                x = tf.cast(tf.fill([2, 3], hvd.rank() + 1), dtype)
                summed = hvd.allreduce(x, op=hvd.Sum, process_set=process_set)
                grouped = hvd.grouped_allreduce([x, x[0]], op=hvd.Max, process_set=process_set)
                scattered = hvd.reducescatter(tf.tile(x, [size, 1]), op=hvd.Sum, process_set=process_set)
                several = hvd.grouped_reducescatter([tf.tile(x, [size, 1])], op=hvd.Sum, process_set=process_set)
                found = running.run([summed, *grouped, scattered, *several])
                everything = sum(rank + 1 for rank in ranks)
                for result, value in zip(
                    found, [everything, max(ranks) + 1, max(ranks) + 1, everything, everything], strict=True
                ):
                    np.testing.assert_array_equal(np.asarray(result, np.float64), np.full(result.shape, value))
                assert [result.shape for result in found] == [(2, 3), (2, 3), (3,), (2, 3), (2, 3)]
        for dtype in MOVED:
            with graph() as running:
                x = tf.cast(tf.fill([hvd.rank() + 1, 2], (hvd.rank() + 1) % 2), dtype)
                gathered = hvd.allgather(x, process_set=process_set)
                groups = hvd.grouped_allgather([x, x[:1]], process_set=process_set)
                sent = hvd.broadcast(x[:1], ranks[-1], process_set=process_set)
                swapped, splits = hvd.alltoall(
                    tf.cast(tf.range(size), dtype), tf.ones([size], tf.int32), process_set=process_set
                )
                even = hvd.alltoall(tf.cast(tf.range(size), dtype), process_set=process_set)
                found = running.run([gathered, *groups, sent, swapped, splits, even])
                rows = np.concatenate([np.full((rank + 1, 2), (rank + 1) % 2) for rank in ranks])
                wanted = [rows, rows, np.array([[(rank + 1) % 2] * 2 for rank in ranks])]
                wanted += [
                    np.full((1, 2), (ranks[-1] + 1) % 2),
                    np.full(size, bool(mine) if dtype is tf.bool else mine),
                ]
                wanted += [np.ones(size), wanted[-1]]
                for result, value in zip(found, wanted, strict=True):
                    np.testing.assert_array_equal(np.asarray(result, np.float64), np.asarray(value, np.float64))


@session
def test_gradients_in_a_graph():
    rank, size = hvd.rank(), hvd.size()
    with graph(threads=1) as running:
        x = tf.constant(np.arange(6.0).reshape(3, 2) + rank)
        loss = {
            "sum": hvd.allreduce(x, op=hvd.Sum),
            "scaled": hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0),
            "average": hvd.grouped_allreduce([x, x], op=hvd.Average)[0],
            "gathered": hvd.allgather(x[: rank + 1] if size < 3 else x),
            "broadcast": hvd.broadcast(x, size - 1),
            "scattered": hvd.reducescatter(tf.tile(x, [size, 1]), op=hvd.Sum),
            "one of a group": hvd.grouped_reducescatter(
                [tf.tile(x, [size, 1]), tf.cast(tf.tile(x, [size, 1]), tf.float32)], op=hvd.Average
            )[0],
            "exchanged": hvd.alltoall(tf.tile(x, [size, 1]), tf.fill([size], 3))[0],
        }
        gradients = {name: tf.gradients(tf.reduce_sum(y) * (rank + 1.0), x)[0] for name, y in loss.items()}
        found = running.run({name: tf.convert_to_tensor(gradient) for name, gradient in gradients.items()})
    everything = total(lambda r: r + 1)
    np.testing.assert_allclose(found["sum"], np.full((3, 2), everything))
    np.testing.assert_allclose(found["scaled"], np.full((3, 2), 1.5 * everything))
    np.testing.assert_allclose(found["average"], np.full((3, 2), everything / size))
    rows = rank + 1 if size < 3 else 3
    np.testing.assert_allclose(found["gathered"][:rows], np.full((rows, 2), everything / size))
    np.testing.assert_allclose(found["gathered"][rows:], 0)
    np.testing.assert_allclose(found["broadcast"], np.full((3, 2), everything / size if rank == size - 1 else 0))
    np.testing.assert_allclose(found["scattered"], np.full((3, 2), everything * size))
    np.testing.assert_allclose(found["one of a group"], np.full((3, 2), everything))
    np.testing.assert_allclose(found["exchanged"], np.full((3, 2), everything))


@session
def test_sparse_gradients_and_groups_of_them():
    rank, size = hvd.rank(), hvd.size()
    with graph(threads=1) as running:
        slices = [
            tf.IndexedSlices(tf.fill([2, 3], float(rank + 1)), tf.constant([0, rank]), tf.constant([4, 3]))
            for _ in range(3)
        ]
        dense = tf.fill([2], float(rank))
        results = hvd.grouped_allreduce([slices[0], dense, slices[1]], op=hvd.Sum)
        results.append(hvd.allreduce(slices[2], op=hvd.Average))
        found = running.run([tf.convert_to_tensor(result) for result in results])
    expected = np.zeros((4, 3))
    for r in range(size):
        expected[0] += r + 1
        expected[r] += r + 1
    np.testing.assert_allclose(found[0], expected)
    np.testing.assert_allclose(found[1], np.full(2, total(lambda r: r)))
    np.testing.assert_allclose(found[2], expected)
    np.testing.assert_allclose(found[3], expected / size)


@session
def test_a_loop_and_a_condition_in_a_graph():
    with graph(threads=1) as running:
        x = v1.placeholder(tf.float32, [])
        _, looped = tf.while_loop(
            lambda i, _: i < 20, lambda i, y: (i + 1, hvd.allreduce(y, op=hvd.Average) + 1.0), [0, x]
        )
        parts = v1.while_loop(
            lambda i, _: i < 20,
            lambda i, y: (i + 1, y.write(i, hvd.allreduce(tf.cast(i, tf.float32) * x, op=hvd.Sum))),
            [0, tf.TensorArray(tf.float32, 20)],
        )[1].stack()
        either = [tf.cond(x > 0, lambda: hvd.allreduce(x, op=hvd.Sum), lambda: x) for _ in range(2)]
        for _ in range(3):
            found = running.run([looped, parts, *either], {x: 1.0})
        assert found[0] == 21.0
        np.testing.assert_allclose(found[1], np.arange(20.0) * hvd.size())
        assert found[2:] == [hvd.size()] * 2


def losses(weights):
    return tf.reduce_sum(weights * float(hvd.rank() + 1))


@session(sets=True)
def test_optimizers_reduce_their_gradients(sets):
    mean = total(lambda r: r + 1) / hvd.size()
    for process_set in sets:
        expected = sum(rank + 1 for rank in process_set.ranks) / len(process_set.ranks)
        for make in (
            lambda: v1.train.GradientDescentOptimizer(1.0),
            lambda: v1.train.MomentumOptimizer(1.0, 0.0),
        ):
            for options in (
                {},
                {"compression": hvd.Compression.fp16},
                {"gradient_predivide_factor": 2.0},
                {"groups": 1},
                {"sparse_as_dense": True},
            ):
                with graph(threads=1) as running:
                    weights = [v1.get_variable(f"w{i}", initializer=np.zeros(3, "float32")) for i in range(3)]
                    optimizer = hvd.DistributedOptimizer(make(), process_set=process_set, **options)
                    step = v1.train.get_or_create_global_step()
                    update = optimizer.minimize(tf.add_n([losses(w) for w in weights]), global_step=step)
                    initialise(running)
                    for _ in range(2):
                        running.run(update)
                    for weight in running.run(weights):
                        np.testing.assert_allclose(weight, np.full(3, -2 * expected), rtol=1e-3)
                    assert running.run(step) == 2
    with graph() as running:
        table = v1.get_variable("table", initializer=np.zeros((5, 2), "float32"))
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0))
        pairs = optimizer.compute_gradients(losses(tf.gather(table, [0, hvd.rank() + 1])))
        assert isinstance(pairs[0][0], tf.IndexedSlices) or hvd.size() == 1
        update = optimizer.apply_gradients(pairs)
        initialise(running)
        running.run(update)
        expected_table = np.zeros((5, 2))
        expected_table[0] = -mean
        for rank in range(hvd.size()):
            expected_table[rank + 1] = -(rank + 1) / hvd.size()
        np.testing.assert_allclose(running.run(table), expected_table, rtol=1e-6)


@session
def test_a_rank_outside_the_process_set_keeps_its_gradients():
    if hvd.size() == 1:
        return
    hvd.shutdown()
    one = hvd.ProcessSet([0])
    hvd.init(process_sets=[one])
    with graph() as running:
        weights = v1.get_variable("w", initializer=0.0)
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), process_set=one)
        update = optimizer.minimize(losses(weights))
        initialise(running)
        running.run(update)
        assert running.run(weights) == -(hvd.rank() + 1)


@session
def test_a_state_has_the_passes_since_the_last_step():
    with graph() as running:
        weight, given = v1.get_variable("weight", initializer=0.0), v1.placeholder(tf.float32, [])
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=3)
        train = optimizer.minimize(weight * given * (hvd.rank() + 1.0))
        initialise(running)
        running.run(train, {given: 1.0})
        state = hvd.elastic.TensorFlowState(session=running, batch=1)
        for _ in range(3):  # the last of these begins the next step
            running.run(train, {given: 10.0})
        state.restore()
        assert running.run(weight) == 0.0
        state.sync()
        running.run(train, {given: 2.0})
        assert running.run(weight) == 0.0
        running.run(train, {given: 4.0})
        np.testing.assert_allclose(running.run(weight), -7.0 * total(lambda r: r + 1) / hvd.size())


@session
def test_several_backward_passes_before_a_step():
    for average in (False, True):
        with graph(threads=1) as running:
            weights = v1.get_variable("w", initializer=np.zeros(2, "float32"))
            factor = v1.placeholder(tf.float32, [])
            optimizer = hvd.DistributedOptimizer(
                v1.train.GradientDescentOptimizer(1.0),
                backward_passes_per_step=3,
                average_aggregated_gradients=average,
            )
            step = v1.train.get_or_create_global_step()
            update = optimizer.minimize(tf.reduce_sum(weights) * factor, global_step=step)
            initialise(running)
            assert not set(v1.local_variables()) & set(v1.global_variables())
            expected = 0.0
            for number in range(1, 8):
                running.run(update, {factor: number * (hvd.rank() + 1)})
                if number % 3 == 0:
                    passes = number + (number - 1) + (number - 2)
                    expected -= passes / (3 if average else 1) * total(lambda r: r + 1) / hvd.size()
                np.testing.assert_allclose(running.run(weights), np.full(2, expected), rtol=1e-6)
                assert running.run(step) == number
    with graph(), raises(ValueError, "compute_gradients()", "backward_passes_per_step=2"):
        weights = v1.get_variable("w", initializer=0.0)
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=2)
        optimizer.apply_gradients([(tf.ones([]), weights)])
    with raises(ValueError, "tf.compat.v1", "graph"):
        hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=2)
    with raises(ValueError, "already", "once"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0)))


@session
def test_local_variables_keep_their_gradients_and_slots_are_the_wrapped_optimizers():
    with graph() as running:
        shared, own = (v1.get_variable(name, initializer=np.zeros(2, "float32")) for name in ("shared", "own"))
        inner = v1.train.MomentumOptimizer(1.0, 0.9)
        optimizer = hvd.DistributedOptimizer(inner, scale_local_gradients=False)
        assert "horovod" in str(optimizer)  # wrappers of other packages look for it
        optimizer.register_local_var(own)
        update = optimizer.minimize(losses(shared) + losses(own))
        assert optimizer.get_slot_names() == inner.get_slot_names() == ["momentum"]
        assert optimizer.get_slot(own, "momentum") is inner.get_slot(own, "momentum")
        assert optimizer.variables() == inner.variables()
        initialise(running)
        running.run(update)
        np.testing.assert_allclose(running.run(shared), np.full(2, -total(lambda r: r + 1) / hvd.size()))
        np.testing.assert_allclose(running.run(own), np.full(2, -(hvd.rank() + 1)) if hvd.size() > 1 else [-1, -1])


@session
def test_broadcast_of_global_variables_and_of_some():
    with graph(threads=1) as running:
        order = ["a", "b", "c"] if hvd.rank() == 0 else ["c", "a", "b"]
        for name in order:  # variables are matched by name
            v1.get_variable(name, initializer=np.full(order.index(name) * 0 + 2, hvd.rank() * 10.0 + ord(name)))
        v1.get_variable("integer", initializer=hvd.rank())
        variables = {variable.op.name: variable for variable in v1.global_variables()}
        everything, some = hvd.broadcast_global_variables(0), hvd.broadcast_variables([variables["a"]], hvd.size() - 1)
        initialise(running)
        running.run(everything)
        found = running.run(variables)
        for name in "abc":
            np.testing.assert_array_equal(found[name], np.full(2, float(ord(name))))
        assert found["integer"] == 0
        running.run(variables["a"].assign(np.full(2, float(hvd.rank()))))
        running.run(some)
        np.testing.assert_array_equal(running.run(variables["a"]), np.full(2, hvd.size() - 1.0))
    with graph() as running:
        running.run(hvd.broadcast_global_variables(0))  # without variables
    with raises(RuntimeError, "hvd.broadcast_variables", "eager"):
        hvd.broadcast_global_variables(0)


@session
def test_a_monitored_session_broadcasts_when_it_is_created():
    hook = hvd.BroadcastGlobalVariablesHook(0)
    for _ in range(2):  # a hook can be reused for another graph
        with tf.Graph().as_default():
            weights = v1.get_variable("w", initializer=float(hvd.rank() + 7))
            optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0))
            update = optimizer.minimize(losses(weights), global_step=v1.train.get_or_create_global_step())
            hooks = [hook, v1.train.StopAtStepHook(last_step=2)]
            with v1.train.MonitoredTrainingSession(hooks=hooks) as running:
                assert running.run(weights) == 7.0
                while not running.should_stop():
                    running.run(update)
                    value = running.run(weights) if not running.should_stop() else None
            assert value is None or value <= 7.0


@session
def test_a_finalized_graph_is_an_error_with_the_remedy():
    with tf.Graph().as_default():
        v1.get_variable("w", initializer=1.0)
        with v1.train.MonitoredTrainingSession(), raises(RuntimeError, "finalized", "BroadcastGlobalVariablesHook"):
            hvd.broadcast_global_variables(0)


@session
def test_objects_and_numbers_with_a_session():
    with graph() as running:
        found = hvd.broadcast_object({"rank": hvd.rank()}, 0, session=running)
        assert found == {"rank": 0}
        assert hvd.broadcast_object_fn(0, session=running)([hvd.rank()]) == [0]
        assert hvd.allgather_object(hvd.rank(), session=running) == list(range(hvd.size()))
        numbers = [
            hvd.rank_op(),
            hvd.size_op(),
            hvd.local_rank_op(),
            hvd.local_size_op(),
            hvd.process_set_included_op(),
        ]
        assert running.run(numbers) == [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), 1]
        assert not hvd._executing_eagerly()
        running.run(hvd.barrier())
        joined = hvd.join()
        assert running.run(joined) in range(hvd.size())
    assert hvd._executing_eagerly()


@session
def test_an_elastic_state_saves_the_variables_of_a_session():
    with graph() as running:
        weights = v1.get_variable("w", initializer=np.full(2, float(hvd.rank())))
        initialise(running)
        state = hvd.elastic.TensorFlowState(session=running, epoch=hvd.rank())
        state.sync()
        np.testing.assert_array_equal(running.run(weights), np.zeros(2))
        assert state.epoch == 0
        running.run(weights.assign(np.ones(2)))
        state.restore()
        np.testing.assert_array_equal(running.run(weights), np.zeros(2))
        running.run(weights.assign(np.ones(2)))
        state.save()
        running.run(weights.assign(np.full(2, 5.0)))
        state.restore()
        np.testing.assert_array_equal(running.run(weights), np.ones(2))


@session
def test_errors_in_a_session_keep_their_types():
    with graph() as running:
        flags = hvd.allreduce(tf.constant([True]), name="flags") if hvd.size() > 1 else None
        with raises((ValueError, tf.errors.InvalidArgumentError), "Process set 99"):  # when the graph is built
            hvd.size_op(process_set_id=99)
        if hvd.size() > 1:
            with pytest.raises(tf.errors.InvalidArgumentError):
                running.run(flags)
            different = hvd.allreduce(tf.zeros([hvd.rank() + 1]), name="different")
            with raises(hvd.HorovodInternalError, "shape"):
                running.run(different)
            np.testing.assert_allclose(running.run(hvd.allreduce(tf.ones([2]), name="later")), [1.0, 1.0])


@session
def test_an_imported_graph_must_be_built_in_this_process():
    with graph():
        hvd.allreduce(tf.ones([2]), name="stored")
        definition = v1.get_default_graph().as_graph_def()
    for node in definition.node:
        if node.op == "HoraCall":
            node.attr["token"].i = 10**9  # of another process
    with graph() as running:
        (found,) = tf.import_graph_def(definition, return_elements=["stored:0"])
        with pytest.raises(tf.errors.InvalidArgumentError, match="build the graph again"):
            running.run(found)


@session
def test_functions_and_sessions_side_by_side():
    @tf.function
    def reduce(x):
        return hvd.allreduce(x, op=hvd.Sum)

    check(reduce(tf.ones([2])), np.full(2, hvd.size()), tf.float32)
    with graph() as running:
        np.testing.assert_array_equal(running.run(reduce(tf.ones([2]))), np.full(2, hvd.size()))
    check(reduce(tf.ones([2])), np.full(2, hvd.size()), tf.float32)
