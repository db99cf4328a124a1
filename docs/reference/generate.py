"""Pages that `make docs` writes from the code: the API reference, the options of the commands, and files from outside
docs/.

A hook of mkdocs (mkdocs.yml). It reads the packages without importing them (griffe), so neither TensorFlow nor Ray need
be there; mkdocstrings then renders signatures and docstrings. Every argument of the modules in EXPLAINED must be
described in its function's docstring.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from hora.cli.dispatch import COMMANDS, LABS
from hora.config import EngineConfig
from hora.launch.options import all_options
from horovod._modules import _MODULES as OLD_MODULES

ROOT = Path(__file__).parents[2]

# A page: its title and the modules on it, whose public names are those of __all__.
PAGES = {
    "torch": ("horovod.torch", ["horovod.torch", "horovod.torch.elastic", "hora.torch.distributed"]),
    "hora": ("hora", ["hora", "hora.workers", "hora.errors"]),
    "workflow": ("hora.workflow", ["hora.workflow"]),
    "spark": (
        "horovod.spark",
        [
            "horovod.spark",
            "hora.spark",
            "horovod.spark.torch",
            "horovod.spark.lightning",
            "horovod.spark.keras",
            "horovod.spark.common.store",
            "horovod.spark.common.backend",
        ],
    ),
    "sparkdl": ("sparkdl", ["sparkdl", "sparkdl.horovod", "sparkdl.horovod.tensorflow.keras"]),
    "tensorflow": ("horovod.tensorflow", ["horovod.tensorflow", "horovod.tensorflow.elastic"]),
    "keras": ("horovod.keras", ["horovod.keras", "horovod.keras.callbacks", "horovod.keras.elastic"]),
    "ray": ("horovod.ray", ["horovod.ray"]),
}
ALSO = {
    "horovod.torch": "Usually `import horovod.torch as hvd`. `hora.torch` is the same module under its own name.",
    "horovod.keras": "`horovod.tensorflow.keras` has the same names for the Keras that comes with TensorFlow.",
    "hora": "`horovod.run` is `hora.run`.",
    "hora.torch.distributed": 'torch finds the backend by itself: `torch.distributed.init_process_group("hora")`.',
    "hora.workers": "`cdsw` and `cml.workers_v1` are these functions' old names (`python -m hora.compat script.py`).",
}
EXPLAINED = ("hora", "horovod.torch", "horovod.torch.elastic", "sparkdl", "sparkdl.horovod", "horovod.spark")
# Classes that a module's __getattr__ makes: the function that makes them, and the class beside it with their text.
MADE = {"LogCallback": ("log_callback_class", "ProgressLog")}
SHIM = "https://unpkg.com/iframe-worker/shim"
TABS = re.compile(r"<!-- tabs -->\n(.*?)<!-- end of tabs -->", re.DOTALL)
# Files of the repository's root that pages link to.
ROOT_FILES = ("ARCHITECTURE.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages (called by mkdocs)."""
    loader = griffe.GriffeLoader(search_paths=[ROOT / "src"])
    for package in ("hora", "horovod", "sparkdl"):
        loader.load(package)
    loader.resolve_aliases(implicit=True, external=False)
    seen: dict[str, str] = {}
    for stem, (title, modules) in PAGES.items():
        text = "\n".join([f"# {title}\n", *(part for name in modules for part in _module(loader, name, seen))])
        files.append(File.generated(config, f"reference/{stem}.md", content=text))
    files.append(File.generated(config, "reference/tasks.md", content="\n".join(_tasks(loader))))
    files.append(File.generated(config, "reference/commands.md", content="\n".join(_commands())))
    files.append(File.generated(config, "reference/environment.md", content="\n".join(_environment())))
    files.append(File.generated(config, "reference/old_names.md", content="\n".join(_old_names())))
    for name in ROOT_FILES:
        if (ROOT / name).exists():
            files.append(File.generated(config, name, content=(ROOT / name).read_text().replace("](docs/", "](")))
    for path in sorted((ROOT / "examples").glob("*.py")):
        files.append(File.generated(config, f"examples/{path.name}", content=path.read_text()))
    return files


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Take the shim for search from files out of this site, not from elsewhere (called by mkdocs)."""
    return output.replace(SHIM, "../" * page.url.count("/") + "reference/worker.js")


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """Leave the shim out of pages that only a web server shows, such as 404.html (called by mkdocs)."""
    return output_content.replace(f'<script src="{SHIM}"></script>', "")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make tabs, and lead links to files of the repository to their copies on the site (called by mkdocs)."""
    install = TABS.search((ROOT / "docs" / "install.md").read_text())
    markdown = TABS.sub(_tabs, markdown.replace("<!-- tabs of install.md -->", install[0] if install else ""))
    return (
        markdown.replace("](../examples/", "](examples/").replace("](../", "](")
        if "/" not in page.file.src_uri
        else markdown
    )


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let long names in code break after a dot or an underscore, and not elsewhere (called by mkdocs)."""
    return re.sub(r"(?<=<code>)[^<]{14,}(?=</code>)", lambda code: re.sub(r"[._/=,(:]", r"\g<0><wbr>", code[0]), html)


def _tabs(blocks: re.Match[str]) -> str:
    """Return blocks with a bold line above each as tabs."""
    named = re.findall(r"^\*\*([^*\n]+)\*\*\n\n(```.*?^```)$", blocks[1], re.MULTILINE | re.DOTALL)
    return "\n".join(f'=== "{name}"\n\n{textwrap.indent(block, "    ")}\n' for name, block in named)


def _module(loader: griffe.GriffeLoader, name: str, seen: dict[str, str]) -> Iterator[str]:
    module = loader.modules_collection[name]
    exports = [str(export) for export in module.exports or ()]
    if not exports:
        exports = [member for member, item in module.members.items() if not item.is_alias and item.is_class]
    yield f"\n## {name}\n"
    if name in ALSO:
        yield ALSO[name] + "\n"
    constants, elsewhere = [], []
    for export in sorted(exports, key=lambda text: (text.lower(), text)):
        if export.startswith("_"):
            continue
        if export in MADE:
            maker, made = MADE[export]
            member = module.members[maker].final_target.parent.members[made]
        else:
            member = module.members.get(export)
        if member is None and f"{name}.{export}" in OLD_MODULES:
            continue
        target = _target(member, export)
        if target.is_module:
            continue
        if target.is_attribute:
            constants.append(f"`{export}`")
        elif target.path in seen:
            elsewhere.append(f"[`{export}`][{target.path}]")
        else:
            seen[target.path] = export
            yield from _entry(loader, name, export, target)
    if constants:
        yield f"Values: {', '.join(constants)}.\n"
    if elsewhere:
        yield f"Described above or on another page, and the same here: {', '.join(elsewhere)}.\n"


def _entry(loader: griffe.GriffeLoader, module: str, name: str, target: Any) -> Iterator[str]:
    shown = target
    if target.docstring is None and target.is_class:  # callbacks: their text and methods are their first base's
        shown = loader.modules_collection[target.resolve(str(target.bases[0]).partition(".")[0])]
        shown = shown.members[str(target.bases[0]).rpartition(".")[2]]
    if shown.docstring is None:
        raise SystemExit(f"docs: {module}.{name} ({shown.path}) has no docstring")
    yield _directive(shown, heading=f"{module}.{name}", toc_label=name, members="false")
    _check_arguments(module, name, shown)
    members = shown.members.items() if shown.is_class else ()
    for member, item in members:
        if not member.startswith("_") and not item.is_alias and item.docstring is not None:
            yield _directive(item, heading_level="4", show_root_toc_entry="false")


def _directive(item: Any, **options: str) -> str:
    return (
        "\n      ".join([f"::: {item.path}\n    options:", *(f"{key}: {value}" for key, value in options.items())])
        + "\n"
    )


def _check_arguments(module: str, name: str, shown: Any) -> None:
    function = shown.members.get("__init__") if shown.is_class else shown
    if function is None or not function.is_function or module not in EXPLAINED:
        return
    text = shown.docstring.value + (function.docstring.value if function.docstring else "")
    # A name is explained by its line in `Args:`, or in backquotes, also as part of an expression: `sharded=True`.
    named = {word for quoted in re.findall(r"`([^`]+)`", text) for word in re.findall(r"\w+", quoted)}
    named |= set(re.findall(r"^ {4}(\w+): ", text.partition("Args:")[2], re.MULTILINE))
    unknown = [item.name for item in function.parameters if item.name not in ("self", "cls", *named)]
    if unknown:
        raise SystemExit(f"docs: the docstring of {module}.{name} does not describe {', '.join(unknown)}")


def _tasks(loader: griffe.GriffeLoader) -> Iterator[str]:
    tasks: dict[str, dict[str, list[str]]] = yaml.safe_load((Path(__file__).parent / "tasks.yml").read_text())
    yield "# Python by task\n\nThe names that you need for a task. Each leads to its signature.\n"
    for task, modules in tasks.items():
        yield f"\n## {task}\n"
        for module, names in modules.items():
            members = loader.modules_collection[module].members
            targets = [_target(members[name], name) for name in names]
            links = (f"[`{name}`][{target.path}]" for name, target in zip(names, targets, strict=True))
            yield f"`{module}`: {', '.join(links)}\n"
    named = {name for modules in tasks.values() for name in modules.get("horovod.torch", ())}
    members = loader.modules_collection["horovod.torch"]
    callables = {str(name) for name in members.exports or () if not str(name).startswith("_")}
    left = {name for name in callables - named if _is_callable(members.members.get(name))}
    if left - {"HorovodInternalError"}:
        raise SystemExit(f"docs: {', '.join(sorted(left))} of horovod.torch has no task in reference/tasks.yml")


def _target(member: Any, name: str) -> Any:
    """Return what a public name means; a module that defines the same name hides it, as `hora.workflow.fit` does."""
    target = member.final_target if member.is_alias else member
    return target.members[name] if target.is_module and name in target.members else target


def _is_callable(member: Any) -> bool:
    return member is not None and (_target(member, "").is_function or _target(member, "").is_class)


def _old_names() -> Iterator[str]:
    yield "# Other module names of Horovod\n"
    yield "Modules that programs import although Horovod's documentation does not name them, and their names' homes.\n"
    yield "| module | names |\n|---|---|"
    for name, row in OLD_MODULES.items():
        if row:
            parts = [row] if isinstance(row, str) else row
            yield f"| `{name}` | {'<br>'.join(f'`{part}`' for part in parts)} |"


def _environment() -> Iterator[str]:
    yield "# Environment variables\n"
    yield "The variables that Hora reads. An option wins over its variable.\n"
    yield "## Of the ranks\n\n| variable | default | meaning | value |\n|---|---|---|---|"
    for item in dataclasses.fields(EngineConfig):
        facts = item.metadata
        default = int(item.default) if isinstance(item.default, bool) else item.default
        shown = "none" if default in ("", ()) else default
        yield f"| `{facts['variable']}` | {shown} | {facts['meaning']} | {facts['what']} |"
    yield "\n## Of the launcher\n\n| variable | default | meaning | option |\n|---|---|---|---|"
    for option in all_options().values():
        if option.launch_variable:
            default = "none" if option.default is None else option.default
            yield f"| `{option.launch_variable}` | {default} | {option.help} | `{option.name}` |"
    yield "\n## Others\n\n| variable | default | meaning |\n|---|---|---|"
    for name, (default, meaning) in yaml.safe_load((Path(__file__).parent / "variables.yml").read_text()).items():
        yield f"| `{name}` | {default or 'none'} | {meaning} |"


def _commands() -> Iterator[str]:
    yield "# Commands\n"
    for name, command in COMMANDS.items():
        for lab in LABS if name == "demo" else (None,):
            title = {"run": "hora run, horovodrun"}.get(name, f"hora {name}{f' {lab}' if lab else ''}")
            yield f"\n## {title}\n"
            parser = (LABS[lab] if lab else command).make_parser()
            summary = command.summary.partition(":")[0]
            if parser is None:
                yield f"{summary[0].upper()}{summary[1:]}.\n"
            if name == "plan":  # its options are those of `hora run`
                yield from _description(parser)
                yield "It takes the options of `hora run`.\n"
            elif parser is None:  # another program's command line, which is not argparse's
                yield "It takes Open MPI's options; [Launchers](../launchers.md) says which have an effect.\n"
            else:
                yield from _options(parser, level=3)


def _options(parser: argparse.ArgumentParser, *, level: int) -> Iterator[str]:
    yield f"```sh\n{' '.join(parser.format_usage().split()).removeprefix('usage: ')}\n```\n"
    yield from _description(parser)
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
        subparsers = [action for action in actions if isinstance(action, argparse._SubParsersAction)]
        rows = [
            _row(parser, action)
            for action in actions
            if action not in subparsers and not {"--help", "--help-all"} & set(action.option_strings)
        ]
        if rows:
            yield f"**{group.title}**\n\n| | |\n|---|---|"
            yield "\n".join(rows) + "\n"
        for name, child in (pair for action in subparsers for pair in action.choices.items()):
            yield f"{'#' * level} {parser.prog} {name}\n"
            yield from _options(child, level=level + 1)
    if parser.epilog:
        yield parser.epilog + "\n"


def _description(parser: argparse.ArgumentParser) -> Iterator[str]:
    if parser.description:
        text, _, examples = parser.description.strip().partition("examples:\n")
        yield text.strip() + "\n"
        if examples:
            yield f"```sh\n{textwrap.dedent(examples).strip()}\n```\n"


def _row(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    formatter = parser._get_formatter()
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    value = "" if action.nargs == 0 else " " + formatter._format_args(action, metavar)
    names = ", ".join(f"`{flag}{value}`" for flag in action.option_strings) or f"`{action.metavar or action.dest}`"
    text = formatter._expand_help(action) if action.help else ""
    text = text.replace("<", "&lt;").replace("|", "\\|")
    return f"| {names} | {text} |".replace("\n", " ")
