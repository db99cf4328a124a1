"""`hora completion`: shell completion for bash, zsh and fish, generated from the commands' parsers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence

from hora.cli.dispatch import COMMANDS, LABS
from hora.spelling import Parser

_SHELLS = ("bash", "zsh", "fish")
_ENDS_AT_COMMAND = ("run", "plan", "mpirun")  # the rest belongs to another program


def main(argv: Sequence[str]) -> int:
    """Print the script for a shell."""
    shell = make_parser().parse_args(argv).shell
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](), end="")
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = Parser(
        prog="hora completion",
        description="Print a script that completes hora's and horovodrun's commands and options.",
        epilog='bash: eval "$(hora completion bash)" in ~/.bashrc; zsh: the same in ~/.zshrc, after compinit; '
        "fish: hora completion fish > ~/.config/fish/completions/hora.fish",
    )
    parser.add_argument("shell", choices=_SHELLS, help="the shell")
    return parser


def _words() -> dict[str, dict[str, str]]:
    """Return the options and subcommands of each command, with a short text."""
    found: dict[str, dict[str, str]] = {}
    for name, command in COMMANDS.items():
        parser = command.make_parser()
        found[name] = dict(_words_of(parser)) if parser is not None else {"--help": "show help"}
    for name, lab in LABS.items():
        parser = lab.make_parser()
        found["demo"] |= {name: lab.summary, **dict(_words_of(parser) if parser is not None else ())}
    return found


def _words_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield name, str(child.description or "")
                yield from _words_of(child)
        elif action.help != argparse.SUPPRESS:
            text = " ".join(str(action.help or "").replace("%%", "%").split())
            for word in action.option_strings or (action.choices or ()):
                yield str(word), text


def _summaries() -> dict[str, str]:
    return {name: command.summary.partition(":")[0] for name, command in COMMANDS.items()}


def _bash() -> str:
    words = _words()
    cases = "\n".join(f"    {name}) words='{' '.join(options)}' ;;" for name, options in words.items())
    ends = "|".join(_ENDS_AT_COMMAND)
    return f"""_hora() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} name=${{COMP_WORDS[1]}} words
  if [[ ${{COMP_WORDS[0]}} == *horovodrun ]]; then name=run
  elif [[ $COMP_CWORD -eq 1 ]]; then
    COMPREPLY=($(compgen -W '{" ".join(words)} --help --version' -- "$current")); return
  fi
  case $name in
{cases}
  esac
  COMPREPLY=()
  case $name in {ends}) [[ $current != -* ]] && return ;; esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _hora hora horovodrun
"""


def _zsh() -> str:
    """Return the zsh script. Descriptions use `_describe`; without a match zsh completes files."""
    lists = []
    for name, options in _words().items():
        rows = " ".join(_quoted(f"{word.replace(':', chr(92) + ':')}:{text}") for word, text in options.items())
        lists.append(f"    {name}) candidates=({rows}) ;;")
    commands = " ".join(_quoted(f"{name}:{summary}") for name, summary in _summaries().items())
    cases = "\n".join(lists)
    return f"""_hora() {{
  local name=$words[2]; local -a candidates
  [[ $words[1] == *horovodrun ]] && name=run
  if (( CURRENT == 2 )) && [[ $words[1] != *horovodrun ]]; then
    candidates=({commands}); _describe command candidates; return
  fi
  case $name in
{cases}
  esac
  _describe -o option candidates || _files
}}
compdef _hora hora horovodrun
"""


def _fish() -> str:
    lines = ["complete -c hora -n __fish_use_subcommand -f"]
    for name, summary in _summaries().items():
        lines.append(f"complete -c hora -n __fish_use_subcommand -f -a {name} -d {_quoted(summary)}")
    for name, options in _words().items():
        for word, text in options.items():
            seen = f"-n '__fish_seen_subcommand_from {name}'"
            lines.append(f"complete -c hora {seen} {_fish_word(word)} -d {_quoted(text)}")
            if name == "run":
                lines.append(f"complete -c horovodrun {_fish_word(word)} -d {_quoted(text)}")
    return "\n".join(lines) + "\n"


def _fish_word(word: str) -> str:
    if word.startswith("--"):
        return f"-l {word[2:]}"
    if word.startswith("-"):
        return f"-s {word[1:]}" if len(word) == 2 else f"-o {word[1:]}"
    return f"-f -a {word}"


def _quoted(text: str) -> str:
    """Quote for a shell with single quotes, which are removed from the text."""
    return "'" + re.sub(r"['\\\n]", " ", text)[:100] + "'"
