"""Turns a one-process training script into an elastic one, with DDP and `hora.elastic.protect`.

`hora init --from --elastic` calls it. The loop stays as it is, because `protect` completes a step that a death
interrupts.
"""

from __future__ import annotations

import ast
import re

from hora.cli.convert import Converted, statements_of

# Of torch.nn.Module, so of DistributedDataParallel, too. Other attributes belong to the model that it wraps.
_OF_EVERY_MODULE = {
    *("apply", "bfloat16", "buffers", "children", "cpu", "cuda", "double", "eval", "float", "forward", "half"),
    *("modules", "named_buffers", "named_children", "named_modules", "named_parameters", "no_sync", "parameters"),
    *("requires_grad_", "to", "train", "training", "zero_grad"),
}
_WITH_STATE = re.compile(r"torch\.optim\.lr_scheduler\.[A-Z]\w+|torch\.(cuda\.)?amp\.(grad_scaler\.)?GradScaler")


class ElasticConverted(Converted):
    """A script whose training goes on when ranks die: its `text`, and `notes` of what its author should check."""

    _imports_of_library = (
        "import torch.distributed as dist",
        "from torch.nn.parallel import DistributedDataParallel",
        "",
        "import hora.elastic",
    )
    _init = 'dist.init_process_group("hora")  # learns this process\'s place in the job'
    _wrapper, _rank, _size = "DistributedDataParallel", "dist.get_rank()", "dist.get_world_size()"
    _local_rank = "dist.get_node_local_rank()"
    _average = "the mean of dist.all_reduce(torch.tensor({value}), dist.ReduceOp.AVG)"

    def __init__(self, text: str) -> None:
        self._models: list[str] = []
        self._optimizers: list[str] = []
        self._with_state: list[str] = []
        self._samplers: list[str] = []
        # The statements that make what `protect` takes, with their functions and targets
        self._made: list[tuple[ast.stmt, ast.AST, str]] = []
        super().__init__(text)

    def _look_at(self, statement: ast.stmt, scope: ast.AST) -> None:
        super()._look_at(statement, scope)
        value = getattr(statement, "value", None)
        if isinstance(statement, ast.Assign) and isinstance(value, ast.Call):
            target = ast.unparse(statement.targets[0])
            if _WITH_STATE.fullmatch(self._name(value.func)):
                self._with_state.append(target)
            if target in self._optimizers or target in self._with_state or f"{target}.sampler" in self._samplers:
                self._made.append((statement, scope, target))

    def _look_at_clipping(self, statement: ast.stmt, call: ast.Call) -> None:
        """Nothing to edit: DDP has averaged the gradients before they are clipped."""

    def _wrap_optimizer(self, statement: ast.stmt, call: ast.Call, target: str) -> None:
        first = call.args[0] if call.args else None
        method = first.func if isinstance(first, ast.Call) else None
        if not isinstance(method, ast.Attribute) or method.attr != "parameters" or not _is_name(method.value):
            self._note(statement, f"wrap the model of {target} before it: model = DistributedDataParallel(model)")
            return
        model = ast.unparse(method.value)
        if model not in self._models:
            self._models.append(model)
            comment = "  # averages the gradients while backward runs"
            self._insert_before(statement, [f"{model} = DistributedDataParallel({model}){comment}"])
        self._optimizers.append(target)

    def _sampler(self, rows: str, order: str) -> str:
        return f"hora.elastic.ElasticSampler({rows}{order})"

    def _share_rows(self, call: ast.Call, loader: str, scope: ast.AST) -> None:
        before = len(self._edits)
        super()._share_rows(call, loader, scope)
        if any("ElasticSampler" in edit[-1] for edit in self._edits[before:]):
            self._samplers.append(f"{loader}.sampler")

    def _look_at_epochs(self, loop: ast.For, loader: str) -> None:
        """Let a newcomer begin with the epoch of the others."""
        ranges = [node for node in ast.walk(loop.iter) if isinstance(node, ast.Call) and _is_range(node)]
        if not ranges:
            self._note(loop, f"begin with {loader}.sampler.epoch: a newcomer enters in the epoch of the others")
            return
        given = ranges[0].args
        first = f"{loader}.sampler.epoch"
        if len(given) == 1:
            self._edit(given[0], f"{first}, {ast.unparse(given[0])}")
        else:
            self._edit(given[0], f"max({ast.unparse(given[0])}, {first})")

    def _start(self) -> None:
        super()._start()
        place = next((scope for _, scope, target in self._made if target in self._optimizers), None)
        if place is None:
            return
        last = [statement for statement, scope, _ in self._made if scope is place][-1]
        for statement, scope, target in self._made:
            if scope is not place:
                self._note(statement, f"{target} is made in another function: give it to hora.elastic.protect")
        here = {target for _, scope, target in self._made if scope is place}
        samplers = [name for name in self._samplers if name.removesuffix(".sampler") in here]
        states = _argument("scheduler", [name for name in self._with_state if name in here])
        line = f"hora.elastic.protect({_plain(self._models)}, {_plain(self._optimizers)}{states}"
        line += f"{_argument('sampler', samplers)})  # a death costs no step"
        self._unwrap(last, place)
        loop = self._loop_after(last)
        if loop is not None:
            self._insert_before(loop, [line])
        else:
            self._insert_after(last, [line])

    def _loop_after(self, last: ast.stmt) -> ast.stmt | None:
        """Return the loop that follows a statement in its own block: what is loaded before it is protected, too."""
        for block in (getattr(node, "body", None) for node in ast.walk(self._tree)):
            if isinstance(block, list) and last in block:
                after = block[block.index(last) + 1 :]
                return next((item for item in after if isinstance(item, ast.For | ast.While)), None)
        return None

    def _unwrap(self, last: ast.stmt, place: ast.AST) -> None:
        """Give attributes of the wrapped models their old meaning in the statements that follow."""
        own = (item for item in statements_of(place) if not isinstance(item, ast.FunctionDef | ast.ClassDef))
        here = {node for statement in own for node in ast.walk(statement)}
        for node in ast.walk(self._tree):
            if not isinstance(node, ast.Attribute) or ast.unparse(node.value) not in self._models:
                continue
            if node.attr in _OF_EVERY_MODULE or (node in here and node.lineno <= last.lineno):
                continue
            inner = f"{ast.unparse(node.value)}.module"
            if node in here:
                self._edit(node.value, inner)
            else:
                self._note(node, f"if this is the model in DistributedDataParallel, write {inner}.{node.attr}")

    def _end(self, last: ast.stmt) -> None:
        self._insert_after(last, ["dist.destroy_process_group()  # waits until every rank has completed the training"])


def _is_range(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == "range" and bool(call.args)


def _is_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Name | ast.Attribute)


def _plain(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"[{', '.join(names)}]"


def _argument(name: str, values: list[str]) -> str:
    return f", {name}={_plain(values)}" if values else ""
