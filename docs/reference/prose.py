"""Check the plain English of the pages: long sentences, long table cells, and words for which there is a better one.

python docs/reference/prose.py        # prints FILE:LINE: and the finding; part of `make lint`
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
# Words a sentence (a clause up to a colon or semicolon) and a cell may have: about 25 and 15.
MOST_WORDS, MOST_IN_CELL = 30, 20
# Explanations for specialists and lists of results: words are checked, lengths are not.
LONG = {"security.md", "protocol.md", "scale.md", "clients.md"}
BETTER = {
    r"whoever": "name the actor: the rank, the user, the host",
    r"everybody|somebody|nobody": "all ranks, a rank, no rank",
    r"giv(?:en?|es) up": "dropped",
    r"(?:refused|rejected) in words": "raises an error",
    r"(?:is|are|was) (?:had|told|believed)|to be had": "name the actor and the field's verb",
    r"(?:and|nor|but) who|[Ww]hat (?:is better|it loses|does not fit)": "name the actor or the thing",
    r"in order to": "to",
    r"simply|just|obviously|easily": "leave it out",
    r"utiliz\w+|leverag\w+": "use",
    r"please note|note that": "say it",
}
_WORDS = re.compile(r"\b(?:" + "|".join(BETTER) + r")\b", re.IGNORECASE)


def findings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the words of each finding in a page."""
    text = re.sub(r"^```.*?^```$", lambda code: "\n" * code[0].count("\n"), path.read_text(), flags=re.M | re.S)
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`\n]*`", "`code`", text))
    begin, sentence = 1, ""
    for number, line in enumerate([*text.splitlines(), ""], 1):
        for word in _WORDS.findall(line):
            better = next(advice for pattern, advice in BETTER.items() if re.fullmatch(pattern, word, re.IGNORECASE))
            yield number, f"{word!r}: better {better}"
        is_table = line.startswith("|")
        if is_table and path.name not in LONG:
            for cell in line.split("|"):
                if len(cell.split()) > MOST_IN_CELL:
                    yield number, f"a table cell of {len(cell.split())} words: {cell.strip()[:60]} …"
        if is_table or not line.strip() or re.match(r"#|<|    |\s*(?:[-*]|\d+\.) ", line):
            yield from ((begin, words) for words in _long(sentence) if path.name not in LONG)
            begin, sentence = number, ""
        if not is_table and not line.startswith(("#", "<", "    ")):
            sentence += " " + line.strip()


def _long(paragraph: str) -> Iterator[str]:
    for sentence in re.split(r"(?<=[.!?:;])\s+", paragraph):
        if len(sentence.split()) > MOST_WORDS:
            yield f"a sentence of {len(sentence.split())} words: {sentence.strip()[:60]} …"


def main() -> int:
    found = [f"{page.relative_to(ROOT)}:{line}: {words}" for page in PAGES for line, words in findings(page)]
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
