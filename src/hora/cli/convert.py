"""Turns the text of a one-process training script into a distributed one; `hora init --from` calls it.

Only edits that are right in every script are made. Notes name the lines that the author has to look at.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Collection, Iterator

from hora.version import page

_WRITERS = (
    "SummaryWriter",
    "TensorBoardLogger",
    "CSVLogger",
    "WandbLogger",
    "write_text",
    "write_bytes",
    "to_csv",
    "savefig",
)
_WRITING = ("wandb.init", "mlflow.start_run", "neptune.init_run", "comet_ml.Experiment", "torch.onnx.export")


class Converted:
    """A script for several ranks: its `text`, and `notes` of what its author should check, one line each.

    Raises ValueError where there is no optimizer to distribute.
    """

    # The words of the library that distributes; a subclass has others.
    _imports_of_library: tuple[str, ...] = ("", "import horovod.torch as hvd")
    _init = "hvd.init()  # learns this process's place in the job; alone it is rank 0 of 1"
    _wrapper, _rank, _size, _local_rank = "DistributedOptimizer", "hvd.rank()", "hvd.size()", "hvd.local_rank()"
    _average = "hvd.allreduce(torch.tensor({value}))"

    def __init__(self, text: str) -> None:
        self._lines = (text if text.endswith("\n") else text + "\n").splitlines(keepends=True)
        self._tree = ast.parse(text)
        self._names = dict(_imports(self._tree))
        self.notes: list[str] = []
        self._edits: list[tuple[int, int, int, int, str]] = []  # from line and byte to line and byte, and the new text
        self._needs_sampler = False
        if any(name.startswith(("horovod", "hora", "torch.distributed")) for name in self._names.values()):
            raise ValueError("the script is distributed already: it imports horovod or torch.distributed")
        functions = (node for node in ast.walk(self._tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
        for scope in (self._tree, *functions):
            for statement in statements_of(scope):
                self._look_at(statement, scope)
        self._note_what_one_rank_decides()
        if not any(self._wrapper in edit[-1] for edit in self._edits):
            raise ValueError(
                "no line such as `optimizer = torch.optim.SGD(model.parameters(), lr=0.1)` was found; "
                f"{page('migration.md')} has the steps to take by hand"
            )
        if not any("manual_seed" in line for line in self._lines):
            self.notes.append(
                "no torch.manual_seed: rows that torch draws (random_split, made-up data) differ between the ranks; "
                "call torch.manual_seed(0) before them"
            )
        self.notes.append(
            f"learning rate: the ranks together take {self._size} times the batch; "
            f"multiply the rate by {self._size} unless your optimizer adapts it"
        )
        self._start()
        self.text = self._edited()
        compile(self.text, "script", "exec")

    def _look_at(self, statement: ast.stmt, scope: ast.AST) -> None:
        value = getattr(statement, "value", None)
        if isinstance(statement, ast.Assign) and isinstance(value, ast.Call):
            name, target = self._name(value.func), ast.unparse(statement.targets[0])
            if re.fullmatch(r"torch\.optim\.(\w+\.)?[A-Z]\w+", name) and "lr_scheduler" not in name:
                self._wrap_optimizer(statement, value, target)
            elif name in ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader"):
                self._share_rows(value, target, scope)
        if isinstance(value, ast.Call):
            self._look_at_clipping(statement, value)
        if isinstance(statement, ast.Expr) and isinstance(value, ast.Call) and self._name(value.func) == "torch.save":
            self._on_rank_0(statement)
        for node in ast.walk(statement) if not hasattr(statement, "body") else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.match(r"cuda:\d", node.value):
                self._note(node, f'names one GPU for all ranks: write "cuda" instead of "{node.value}"')

    def _look_at_clipping(self, statement: ast.stmt, call: ast.Call) -> None:
        name = self._name(call.func)
        if name == "torch.nn.utils.clip_grad_norm_":
            self._edit(call.func, "hvd.clip_grad_norm_")  # it averages first
        elif name == "torch.nn.utils.clip_grad_value_":
            self._note(statement, "clips gradients before they are averaged; call optimizer.synchronize() before it")

    def _wrap_optimizer(self, statement: ast.stmt, call: ast.Call, target: str) -> None:
        first = call.args[0] if call.args else None
        named, lines = "", []
        if isinstance(first, ast.Call) and isinstance(first.func, ast.Attribute) and first.func.attr == "parameters":
            model = ast.unparse(first.func.value)
            named = f", named_parameters={model}.named_parameters()"
            lines = [f"hvd.broadcast_parameters({model}.state_dict(), root_rank=0)  # all ranks start from rank 0's"]
        else:
            self._note(statement, "add hvd.broadcast_parameters(model.state_dict(), root_rank=0) for your model")
        lines.insert(0, f"{target} = hvd.DistributedOptimizer({target}{named})  # averages the gradients")
        self._insert_after(statement, [*lines, f"hvd.broadcast_optimizer_state({target}, root_rank=0)"])

    def _share_rows(self, call: ast.Call, loader: str, scope: ast.AST) -> None:
        given = {keyword.arg: keyword for keyword in call.keywords}
        shuffle, dataset = given.get("shuffle"), call.args[0] if call.args else None
        if shuffle is None or dataset is None or {"sampler", "batch_sampler"} & set(given):
            self._note(call, f"every rank reads all rows of {loader}; give it a DistributedSampler if it trains")
            return
        if isinstance(shuffle.value, ast.Constant) and not shuffle.value.value:
            return  # a loader for validation: each rank sees all rows
        rows = ast.unparse(dataset)
        if not isinstance(dataset, ast.Name | ast.Attribute):  # made here: give it a name
            rows = re.sub(r"\W+", "_", loader) + "_rows"
            self._edit(dataset, f"({rows} := {ast.unparse(dataset)})")
        order = "" if isinstance(shuffle.value, ast.Constant) else f", shuffle={ast.unparse(shuffle.value)}"
        self._edit(shuffle, f"sampler={self._sampler(rows, order)}")
        epochs = list(_epoch_loops(scope, loader))
        if not epochs:
            self._note(call, f"call {loader}.sampler.set_epoch(epoch) at the start of every epoch")
        for loop in epochs:
            epoch = ast.unparse(loop.target)
            self._insert_before(loop.body[0], [f"{loader}.sampler.set_epoch({epoch})  # another order of rows"])
            self._look_at_epochs(loop, loader)

    def _sampler(self, rows: str, order: str) -> str:
        """Return the sampler that gives each rank its share of the rows."""
        self._needs_sampler = True
        return f"DistributedSampler({rows}, num_replicas={self._size}, rank={self._rank}{order})"

    def _look_at_epochs(self, loop: ast.For, loader: str) -> None:
        """Edit the head of a loop over epochs."""

    def _on_rank_0(self, statement: ast.stmt) -> None:
        if self._indent(statement) is None:
            self._note(statement, f"let rank 0 alone save: if {self._rank} == 0:")
            return
        self._insert_before(statement, [f"if {self._rank} == 0:  # one rank writes"])
        for line in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1):
            self._edits.append((line, 0, line, 0, "    "))

    def _note_what_one_rank_decides(self) -> None:
        """Note what needs a value that all ranks have, or only one rank: the script's own code does it on each."""
        plateaus = {
            ast.unparse(target)
            for node in ast.walk(self._tree)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
            for target in node.targets
            if self._name(node.value.func).endswith("ReduceLROnPlateau")
        }
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Call):
                self._note_call(node, plateaus)
            elif isinstance(node, ast.For | ast.While):
                for item in _own_statements(node):
                    if isinstance(item, ast.If) and _ends_by_result(item, node):
                        self._note(
                            item,
                            "ends this rank's loop by its own result, and the others wait for it: decide by the "
                            f"average, {self._average.format(value='value')}, on all ranks alike",
                        )

    def _note_call(self, call: ast.Call, plateaus: Collection[str]) -> None:
        name = self._name(call.func)
        last = name.rpartition(".")[2]
        if last == "step" and call.args and ast.unparse(call.func).rpartition(".")[0] in plateaus:
            value = ast.unparse(call.args[0])
            self._note(
                call,
                "each rank would set its own learning rate: give the scheduler the average over the ranks, "
                f"{self._average.format(value=value)}.item()",
            )
        elif last in _WRITERS or name in _WRITING:
            self._note(
                call, f"every rank would write: let rank 0 alone call {last} and what uses it: {self._rank} == 0"
            )
        elif last in ("tqdm", "trange") and not any(keyword.arg == "disable" for keyword in call.keywords):
            self._note(call, f"every rank would draw a progress bar: {last}(…, disable={self._rank} != 0)")
        elif last in ("tqdm", "trange"):
            self._note(call, f"every rank would draw a progress bar: add `or {self._rank} != 0` to its disable=")

    def _start(self) -> None:
        body = self._tree.body
        last = next(item for item in body if isinstance(item, ast.Import | ast.ImportFrom))
        for item in body[body.index(last) :]:
            if not isinstance(item, ast.Import | ast.ImportFrom):
                break
            last = item
        lines = ["import torch"] if self._names.get("torch") != "torch" else []
        if self._needs_sampler:
            lines.append("from torch.utils.data.distributed import DistributedSampler")
        lines += self._imports_of_library
        init = [self._init]
        if any("cuda" in line for line in self._lines):
            init += [
                "if torch.cuda.is_available():  # one GPU for each process of a machine",
                f"    torch.cuda.set_device({self._local_rank} % torch.cuda.device_count())",
            ]
        main = next((item for item in body if _is_main(item)), None)
        plain = [item for item in body if not isinstance(item, ast.FunctionDef | ast.ClassDef) and item is not main]
        if isinstance(main, ast.If) and not any(
            item.lineno <= edit[0] <= (item.end_lineno or 0) for item in plain for edit in self._edits
        ):
            self._insert_before(main.body[0], init)
            self._end(main.body[-1])
        else:
            self._end(body[-1])
            lines += ["", *init]
        self._insert_after(last, lines)

    def _end(self, last: ast.stmt) -> None:
        """Add what the script does after its last statement."""

    def _name(self, node: ast.expr) -> str:
        """Return the full name of a function, as its module calls it."""
        head, _, rest = ast.unparse(node).partition(".")
        return ".".join(part for part in (self._names.get(head, head), rest) if part)

    def _note(self, node: ast.stmt | ast.expr, words: str) -> None:
        self.notes.append(f"line {node.lineno}: {words}")

    def _indent(self, statement: ast.stmt) -> str | None:
        """Return the blanks before a statement, or None if it shares its line with another one."""
        before = self._lines[statement.lineno - 1].encode()[: statement.col_offset].decode()
        return before if not before.strip() else None

    def _edit(self, node: ast.expr | ast.keyword, text: str) -> None:
        end = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
        self._edits.append((node.lineno, node.col_offset, *end, text))

    def _insert_before(self, statement: ast.stmt, lines: list[str]) -> None:
        indent = self._indent(statement)
        if indent is None:
            self._note(statement, f"put before it: {lines[0]}")
            return
        self._edits.append((statement.lineno, 0, statement.lineno, 0, "".join(f"{indent}{line}\n" for line in lines)))

    def _insert_after(self, statement: ast.stmt, lines: list[str]) -> None:
        indent = self._indent(statement) or ""
        after = (statement.end_lineno or statement.lineno) + 1
        self._edits.append((after, 0, after, 0, "".join(f"{indent}{line}".rstrip() + "\n" for line in lines)))

    def _edited(self) -> str:
        starts = [0, *itertools.accumulate(len(line.encode()) for line in self._lines)]
        text = "".join(self._lines).encode()
        places = [(starts[edit[0] - 1] + edit[1], starts[edit[2] - 1] + edit[3], edit[4]) for edit in self._edits]
        places.reverse()  # the last edit of a place first, so that its edits end up in order
        for begin, end, new in sorted(places, key=lambda place: place[0], reverse=True):
            text = text[:begin] + new.encode() + text[end:]
        return text.decode()


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield each imported name, and the full name of what it stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                yield (item.asname, item.name) if item.asname else (item.name.partition(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom):
            for item in node.names:
                yield item.asname or item.name, f"{node.module}.{item.name}"


def statements_of(scope: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a function or module, without those of the functions inside it."""
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, ast.stmt):
            yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from statements_of(child)


def _own_statements(loop: ast.For | ast.While) -> Iterator[ast.stmt]:
    """Yield the statements of a loop that its `break` would end, without those of loops inside it."""
    waiting: list[ast.stmt] = list(loop.body)
    while waiting:
        statement = waiting.pop(0)
        yield statement
        if not isinstance(statement, ast.For | ast.While | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            waiting += [item for item in ast.iter_child_nodes(statement) if isinstance(item, ast.stmt)]


def _ends_by_result(condition: ast.If, loop: ast.For | ast.While) -> bool:
    """Return whether an `if` ends a loop over epochs by more than the number of passes."""
    if not any(isinstance(item, ast.Break) for item in condition.body):
        return False
    target = ast.unparse(loop.target) if isinstance(loop, ast.For) else ""
    asked = {item.id for item in ast.walk(condition.test) if isinstance(item, ast.Name)}
    about = " ".join(asked | {ast.unparse(condition.test)}).lower()
    over_epochs = "epoch" in target or any(isinstance(item, ast.For | ast.While) for item in loop.body)
    counts = asked <= {target} and not any(isinstance(item, ast.Call) for item in ast.walk(condition.test))
    return (over_epochs and not counts) or any(word in about for word in ("stop", "patience"))


def _epoch_loops(scope: ast.AST, loader: str) -> Iterator[ast.For]:
    """Yield the innermost loops around the loops over a loader."""
    loops = [item for item in statements_of(scope) if isinstance(item, ast.For) and not _mentions(item.iter, loader)]
    loops = [loop for loop in loops if any(_mentions(item, loader) for item in loop.body)]
    for loop in loops:
        inner = [other for other in loops if other is not loop and other in ast.walk(loop)]
        if isinstance(loop.target, ast.Name) and not inner:
            yield loop


def _mentions(node: ast.AST, name: str) -> bool:
    return any(isinstance(item, ast.Name | ast.Attribute) and ast.unparse(item) == name for item in ast.walk(node))


def _is_main(item: ast.stmt) -> bool:
    return isinstance(item, ast.If) and ast.unparse(item.test) == "__name__ == '__main__'"
