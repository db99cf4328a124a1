"""Collectives of horovod.tensorflow against numpy: eager and in functions, every dtype, gradients."""

from __future__ import annotations

import pytest

pytest.importorskip("tensorflow", reason="needs TensorFlow: make test-tensorflow")

import pickle
import threading
import warnings

import numpy as np
import tensorflow as tf
from tf_session import DTYPES, FLOATS, MOVED, SMALL, check, mine, of_all, raises, session

import horovod.tensorflow as hvd
import horovod.torch

pytestmark = pytest.mark.ranks(1, 2, 3, 4)
OPS = [hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product]
NUMPY = {hvd.Sum: np.sum, hvd.Min: np.min, hvd.Max: np.max, hvd.Product: np.prod}


def reduced(values, op):
    stack = np.stack([np.asarray(value, np.float64) for value in values])
    if op == hvd.Average:
        total = stack.mean(0)
        return total if values[0].dtype.kind in "fV" else np.trunc(total)
    return NUMPY[op](stack, axis=0)


def both_ways(function, *arguments):
    """Yield the results in eager mode, in a function of known shapes, and in one of unknown shapes."""
    yield function(*arguments)
    yield tf.function(function)(*arguments)
    unknown = [tf.TensorSpec(None, tensor.dtype) for tensor in arguments]
    yield tf.function(function, input_signature=unknown)(*arguments)


@session(sets=True)
def test_allreduce_of_every_dtype_and_op(sets):
    for process_set in sets:
        for dtype in DTYPES:
            for op in OPS:

                def reduce(x, op=op, process_set=process_set):
                    return hvd.allreduce(x, op=op, process_set=process_set)

                for result in both_ways(reduce, mine((5, 17), dtype)):
                    check(result, reduced(of_all(process_set, (5, 17), dtype), op), dtype)
        for dtype in SMALL:
            for op in (hvd.Sum, hvd.Min, hvd.Max, hvd.Average, hvd.Product):
                for result in both_ways(
                    lambda x, op=op, p=process_set: hvd.allreduce(x, op=op, process_set=p), mine((5, 17), dtype)
                ):
                    expected = reduced(of_all(process_set, (5, 17), dtype), op)
                    check(result, expected.astype(np.int64).astype(dtype.as_numpy_dtype), dtype)  # products wrap
    if hvd.size() > 1:
        with raises(ValueError, "not supported", "convert the tensor"):
            hvd.allreduce(tf.constant([True]))


@session
def test_shapes_names_variables_and_scale_factors():
    for shape in [(), (0,), (1,), (0, 3), (3, 4, 17)]:
        for result in both_ways(lambda x: hvd.allreduce(x, op=hvd.Sum), mine(shape, tf.float32)):
            check(result, reduced(of_all(hvd.global_process_set, shape, tf.float32), hvd.Sum), tf.float32)
    variable = tf.Variable([1.0, 2.0])
    check(hvd.allreduce(variable, name="a name!"), np.array([1.0, 2.0]), tf.float32)
    with tf.name_scope("layer"):
        scaled = hvd.allreduce(variable, name="a", op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    check(scaled, np.array([2.0, 4.0]) * hvd.size(), tf.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(hvd.allreduce(variable, average=False), np.array([1.0, 2.0]) * hvd.size(), tf.float32)
    assert "average" in str(caught[0].message)
    with raises(ValueError, "op", "average"):
        hvd.allreduce(variable, average=True, op=hvd.Sum)


@session
def test_grouped_allreduce_and_compression():
    tensors = [mine((3, 2), tf.float32), mine((5,), tf.float64, salt=1), mine((), tf.float32, salt=2)]

    def reduce(*tensors):
        return hvd.grouped_allreduce(list(tensors), op=hvd.Sum, compression=hvd.Compression.fp16, name="group")

    for results in both_ways(reduce, *tensors):
        for salt, (result, tensor) in enumerate(zip(results, tensors, strict=True)):
            everybody = of_all(hvd.global_process_set, tuple(tensor.shape), tensor.dtype, salt)
            check(result, reduced(everybody, hvd.Sum), tensor.dtype)
    assert hvd.grouped_allreduce([]) == []


@session
def test_indexed_slices_are_gathered():
    def slices():
        return tf.IndexedSlices(
            tf.fill([2, 3], float(hvd.rank() + 1)), tf.constant([0, hvd.rank()]), tf.constant([4, 3])
        )

    for make in (
        lambda op: hvd.allreduce(slices(), op=op),
        lambda op: tf.function(lambda: hvd.allreduce(slices(), op=op))(),
    ):
        for op in (hvd.Sum, hvd.Average):
            result = make(op)
            assert isinstance(result, tf.IndexedSlices)
            expected = np.zeros((4, 3))
            for rank in range(hvd.size()):
                for index in (0, rank):
                    expected[index] += (rank + 1) / (hvd.size() if op == hvd.Average else 1)
            check(tf.convert_to_tensor(result), expected, tf.float32)
    with pytest.raises(NotImplementedError, match="sparse_as_dense"):
        hvd.allreduce(slices(), op=hvd.Adasum)
    with pytest.raises(NotImplementedError):
        hvd.allreduce(slices(), op=hvd.Sum, prescale_factor=0.5)


@session
def test_short_integers_are_averaged_in_full_range_and_multiplied_like_their_products():
    largest = {tf.uint8: 255, tf.int8: 127, tf.int16: 32767}
    for dtype, number in largest.items():
        given = tf.constant([number, number - 1, 0], dtype)
        for averages in both_ways(lambda x: hvd.allreduce(x, op=hvd.Average), given):
            check(averages, [number, number - 1, 0], dtype)
        products = hvd.grouped_allreduce([tf.constant([3, 2], dtype), tf.ones([2])], op=hvd.Product)
        with np.errstate(over="ignore"):
            expected = np.array([3, 2], dtype.as_numpy_dtype) ** hvd.size()
        check(products[0], expected, dtype)
        check(products[1], [1.0, 1.0], tf.float32)
        for scattered in both_ways(lambda x: hvd.reducescatter(x, op=hvd.Average), tf.fill([hvd.size()], given[0])):
            check(scattered, [number], dtype)


@session
def test_averages_of_integer_slices_are_quotients():
    for dtype, quotient in (
        (tf.uint8, tf.float32),
        (tf.int16, tf.float32),
        (tf.int32, tf.float64),
        (tf.int64, tf.float64),
    ):
        slices = tf.IndexedSlices(tf.constant([1, 2], dtype), tf.constant([0, 1]))
        for average in (hvd.allreduce(slices), tf.function(lambda s=slices: hvd.allreduce(s))()):
            check(average.values, np.tile([1 / hvd.size(), 2 / hvd.size()], hvd.size()), quotient)


@session
def test_an_unknown_process_set_in_a_graph_is_a_value_error():
    unknown = hvd.ProcessSet([0])
    for build in (
        lambda: hvd.allreduce(tf.ones(3), process_set=unknown),
        lambda: hvd.allgather(tf.ones(3), process_set=unknown),
        lambda: hvd.broadcast(tf.ones(3), 0, process_set=unknown),
        lambda: hvd.alltoall(tf.ones(3), process_set=unknown),
        lambda: hvd.reducescatter(tf.ones(3), process_set=unknown),
        lambda: hvd.size_op(99),
        lambda: hvd.process_set_included_op(99),
    ):
        with raises(ValueError, "does not exist"):
            tf.function(build)()
        with tf.Graph().as_default(), raises(ValueError, "does not exist"):
            build()


@session(sets=True)
def test_allgather_of_different_rows(sets):
    for process_set in sets:
        for dtype in MOVED:

            def gather(x, process_set=process_set):
                return hvd.allgather(x, process_set=process_set)

            def rows(rank):
                return (rank + 1, 3)

            expected = np.concatenate([of_all([r], rows(r), dtype)[0] for r in process_set.ranks])
            for result in both_ways(gather, mine(rows(hvd.rank()), dtype)):
                check(result, expected, dtype)
    grouped = tf.function(lambda a, b: hvd.grouped_allgather([a, b], name="pair"))
    first, second = grouped(mine((1, 2), tf.float32), mine((2,), tf.int64))
    check(first, np.concatenate(of_all(hvd.global_process_set, (1, 2), tf.float32)), tf.float32)
    check(second, np.concatenate(of_all(hvd.global_process_set, (2,), tf.int64)), tf.int64)


@session(sets=True)
def test_broadcast(sets):
    for process_set in sets:
        for root in process_set.ranks:
            for dtype in MOVED:
                for result in both_ways(
                    lambda x, r=root, p=process_set: hvd.broadcast(x, r, process_set=p), mine((4, 3), dtype)
                ):
                    check(result, of_all([root], (4, 3), dtype)[0], dtype)
    variables = [tf.Variable(mine((3,), tf.float32)), tf.Variable(mine((), tf.int64))]
    assert hvd.broadcast_(variables, 0)[0] is variables[0]
    check(variables[0], of_all([0], (3,), tf.float32)[0], tf.float32)
    check(variables[1], of_all([0], (), tf.int64)[0], tf.int64)


@session(sets=True)
def test_alltoall(sets):
    for process_set in sets:
        members, me = len(process_set.ranks), process_set.rank()
        splits = tf.range(1, members + 1)
        rows = members * (members + 1) // 2 + 1  # the last row is not sent
        starts = [sum(range(1, m + 1)) for m in range(members)]

        def exchange(x, splits=splits, process_set=process_set):
            return hvd.alltoall(x, splits, process_set=process_set)

        for dtype in MOVED:
            expected = np.concatenate(
                [of_all([r], (rows, 2), dtype)[0][starts[me] : starts[me] + me + 1] for r in process_set.ranks]
            )
            for output, received in both_ways(exchange, mine((rows, 2), dtype)):
                check(output, expected, dtype)
                check(received, np.full(members, me + 1), tf.int32)
        for output in both_ways(lambda x, p=process_set: hvd.alltoall(x, process_set=p), mine((members, 2), tf.int32)):
            check(output, np.stack([of_all([r], (members, 2), tf.int32)[0][me] for r in process_set.ranks]), tf.int32)


@session(sets=True)
def test_reducescatter(sets):
    for process_set in sets:
        members, me = len(process_set.ranks), process_set.rank()
        for dtype in DTYPES:
            for op in (hvd.Sum, hvd.Average):
                expected = np.array_split(reduced(of_all(process_set, (5, 2), dtype), op), members)[me]

                def scatter(x, op=op, process_set=process_set):
                    return hvd.reducescatter(x, op=op, process_set=process_set)

                def scatter_two(x, op=op, process_set=process_set):
                    return hvd.grouped_reducescatter([x, x], op=op, process_set=process_set)

                for result in both_ways(scatter, mine((5, 2), dtype)):
                    check(result, expected, dtype)
                for results in both_ways(scatter_two, mine((5, 2), dtype)):
                    check(results[1], expected, dtype)


def gradients(function, x, weights):
    """Yield the gradient of sum(function(x) * weights), eager and in a function."""

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(function(x) * weights)
        return tape.gradient(loss, x)

    yield gradient(x)
    yield tf.function(gradient)(x)


@session(sets=True)
def test_gradients_equal_the_formulas(sets):
    for process_set in sets:
        members, me, ranks = len(process_set.ranks), process_set.rank(), process_set.ranks
        for dtype in FLOATS:
            x, w = mine((4, 3), dtype), mine((4, 3), dtype, salt=1)
            w_all = of_all(process_set, (4, 3), dtype, salt=1)
            for op in (hvd.Sum, hvd.Average):
                for result in gradients(
                    lambda x, o=op, p=process_set: hvd.allreduce(x, op=o, prescale_factor=0.5, process_set=p), x, w
                ):
                    check(result, reduced(w_all, op) * 0.5, dtype)

            rows = 4 * members
            w = mine((rows, 3), dtype, salt=2)
            average = reduced(of_all(process_set, (rows, 3), dtype, salt=2), hvd.Average)
            for result in gradients(lambda x, p=process_set: hvd.allgather(x, process_set=p), x, w):
                check(result, average[4 * me : 4 * me + 4], dtype)

            w = mine((4, 3), dtype, salt=1)
            for result in gradients(lambda x, p=process_set: hvd.broadcast(x, p.ranks[-1], process_set=p), x, w):
                mean = reduced(w_all, hvd.Average)
                check(result, mean if hvd.rank() == ranks[-1] else mean * 0, dtype)

            splits, x = tf.ones(members, tf.int32), mine((members + 1, 3), dtype)
            w = mine((members, 3), dtype, salt=3)
            for result in gradients(lambda x, s=splits, p=process_set: hvd.alltoall(x, s, process_set=p)[0], x, w):
                back = [of_all([r], (members, 3), dtype, salt=3)[0][me] for r in ranks]
                check(result, np.stack([*back, np.zeros(3)]), dtype)

            x, mine_rows = mine((2 * members, 3), dtype), (2, 3)
            w = mine(mine_rows, dtype, salt=4)
            for op, factor in ((hvd.Sum, members), (hvd.Average, 1)):
                expected = np.concatenate(of_all(process_set, mine_rows, dtype, salt=4)).astype(np.float64) * factor * 2
                for result in gradients(
                    lambda x, o=op, p=process_set: hvd.reducescatter(x, op=o, postscale_factor=2.0, process_set=p), x, w
                ):
                    check(result, expected, dtype)


@session
def test_gradients_of_gradients():
    x = tf.constant([3.0])
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = hvd.allreduce(x, op=hvd.Average) ** 3
        first = inner.gradient(y, x)
    check(outer.gradient(first, x), np.array([18.0]), tf.float32)


@session
def test_a_function_with_a_loop_is_traced_again():
    traces = []

    @tf.function
    def total(x):
        traces.append(x.shape)
        result = tf.zeros_like(x)
        for i in tf.range(4):
            result += hvd.allreduce(x * tf.cast(i, x.dtype), op=hvd.Sum)
        return result

    for rows in (2, 3):
        check(total(tf.ones([rows])), np.full(rows, 6.0 * hvd.size()), tf.float32)
    assert len(traces) == 2


@session
def test_functions_run_concurrently_in_different_orders_on_each_rank():
    functions = [tf.function(lambda x, i=i: hvd.allreduce(x, op=hvd.Sum, name=f"function{i}")) for i in range(3)]
    for function in functions:
        function(tf.ones([2]))
    results: dict[int, np.ndarray] = {}

    def call(index):
        results[index] = functions[index](tf.fill([2], float(index))).numpy()

    threads = [threading.Thread(target=call, args=((i + hvd.rank()) % 3,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {index: list(value) for index, value in results.items()} == {
        index: [index * hvd.size()] * 2 for index in range(3)
    }


@session(sets=True)
def test_rank_and_size_ops_are_evaluated_at_run_time(sets):
    @tf.function
    def place():
        return hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op()

    assert [int(value) for value in place()] == [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()]
    for process_set in sets:
        assert int(hvd.size_op(process_set.process_set_id)) == len(process_set.ranks)
        assert int(hvd.process_set_included_op(process_set.process_set_id)) == 1
    with raises(ValueError, "process set 77", f"rank {hvd.rank()}"):
        hvd.size_op(77)


@session
def test_join_and_objects():
    for _ in range(hvd.rank() + 1):
        result = hvd.allreduce(tf.ones([2]), op=hvd.Sum, name="uneven")
    last = hvd.join()
    assert last.dtype == tf.int32
    assert int(last) == hvd.size() - 1
    check(result, np.full(2, 1.0), tf.float32) if hvd.rank() == hvd.size() - 1 else None
    assert hvd.broadcast_object({"from": hvd.rank()}, root_rank=0) == {"from": 0}
    assert hvd.broadcast_object_fn(root_rank=hvd.size() - 1)(hvd.rank()) == hvd.size() - 1
    assert hvd.allgather_object(hvd.rank() * 2) == [2 * rank for rank in range(hvd.size())]
    assert hvd.broadcast_object(hvd.rank(), session=object()) == 0  # a session is accepted but not needed


@session
def test_both_front_ends_share_one_engine():
    import torch

    assert horovod.torch.is_initialized()
    assert horovod.torch.rank() == hvd.rank()
    assert horovod.torch.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2
    check(hvd.allreduce(tf.ones(2), op=hvd.Sum), np.full(2, float(hvd.size())), tf.float32)


@session
def test_invalid_use_raises_errors_with_explanations():
    with raises(ValueError, "string", "float32"):
        hvd.allreduce(tf.constant(["a"]))
    with raises(ValueError, "jit_compile=False"):
        tf.function(lambda x: hvd.allreduce(x), jit_compile=True)(tf.ones(2))
    with raises(RuntimeError, "broadcast_variables"):
        hvd.broadcast_global_variables(0)
    if hvd.size() > 1:
        with raises(ValueError, "rank 1", "same model"):
            hvd.broadcast_variables([tf.Variable(tf.ones([2 + (hvd.rank() == 1)]))], 0)
        with raises(ValueError, "rank 1", "2 of them"):
            hvd.broadcast_variables([tf.Variable(1.0)] * (1 if hvd.rank() == 1 else 2), 0)
        with pytest.raises(hvd.HorovodInternalError, match="rank") as caught:
            hvd.allreduce(tf.ones([1 + hvd.rank()]), name="shapes")
        assert type(pickle.loads(pickle.dumps(caught.value))) is hvd.HorovodInternalError
        for kind in (hvd.HorovodInternalError, tf.errors.FailedPreconditionError, tf.errors.UnknownError):
            with pytest.raises(kind, match="rank"):
                tf.function(lambda x: hvd.allreduce(x, name="in a function"))(tf.ones([1 + hvd.rank()]))
        for kind in (ValueError, tf.errors.InvalidArgumentError):
            with pytest.raises(kind, match="multiple"):
                hvd.alltoall(tf.ones([hvd.size() + 1]))
    check(hvd.allreduce(tf.ones(2), op=hvd.Sum), np.full(2, float(hvd.size())), tf.float32)


@session
def test_an_exception_inside_a_step_leaves_the_runtime_intact():
    @tf.function
    def step(x, limit):
        total = hvd.allreduce(x, op=hvd.Sum)
        tf.debugging.assert_less(tf.reduce_max(total), limit)
        return total

    with pytest.raises(tf.errors.InvalidArgumentError):
        step(tf.ones(2), 0.5)
    check(step(tf.ones(2), 100.0), np.full(2, float(hvd.size())), tf.float32)
