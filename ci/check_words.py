"""Finds words in comments, docstrings and Markdown that `words.toml` lists, because the field has a better word.

    python ci/check_words.py [PATH]...

The script prints the location of each use, and the word to use instead. The exit status is 1 if a use was found.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


ROOT = Path(__file__).resolve().parent.parent
_FENCE = re.compile(r"^\s*(```|~~~)")


class Rule(NamedTuple):
    """A word to avoid, and its replacements.

    Attributes:
        avoid: pattern of the word.
        say: the words to use instead.
        right: patterns of correct uses of the word.
        outside: folders and files in which the word has another meaning, and is not checked.
    """

    avoid: re.Pattern[str]
    say: str
    right: tuple[re.Pattern[str], ...]
    outside: tuple[str, ...]

    def uses(self, text: str) -> Iterator[str]:
        """Yields the uses of the word in a line, except the uses that a pattern of ``right`` covers."""
        allowed = [match.span() for pattern in self.right for match in pattern.finditer(text)]
        for match in self.avoid.finditer(text):
            if not any(begin <= match.start() and match.end() <= end for begin, end in allowed):
                yield match.group()


def read_rules(path: Path) -> list[Rule]:
    def pattern(text: str) -> re.Pattern[str]:
        # Identifiers (in backticks, or with underscores) and names in an Args list do not match, because they are not prose.
        return re.compile(rf"(?<![\w`./-]){text}(?![\w`/:-]|\.\w|, \w+:)", re.IGNORECASE)

    listed = tomllib.loads(path.read_text(encoding="utf-8"))["rule"]
    return [
        Rule(
            pattern(rule["avoid"]),
            rule["say"],
            tuple(pattern(text) for text, _ in rule.get("right", ())),
            tuple(path for path, _ in rule.get("outside", ())),
        )
        for rule in listed
    ]


def prose_of_python(source: str) -> Iterator[tuple[int, str]]:
    """Yields line number and text of comments and docstrings."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for index, line in enumerate(node.value.value.splitlines()):
                yield node.lineno + index, line.strip()


def prose_of_markdown(source: str) -> Iterator[tuple[int, str]]:
    """Yields number and text of each line outside fenced code blocks, without inline code."""
    fenced = False
    for number, line in enumerate(source.splitlines(), 1):
        if _FENCE.match(line):
            fenced = not fenced
        elif not fenced:
            yield number, re.sub(r"`[^`]*`", "``", line.strip())


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    source = path.read_text(encoding="utf-8")
    return prose_of_python(source) if path.suffix == ".py" else prose_of_markdown(source)


def main(paths: list[str]) -> int:
    rules = read_rules(ROOT / "ci" / "words.toml")
    listed = subprocess.run(
        ["git", "ls-files", "--", *(paths or ["*.py", "*.md"])], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = 0
    for name in listed.stdout.splitlines():
        if not name.endswith((".py", ".md")) or not (ROOT / name).exists():
            continue
        applied = [rule for rule in rules if not name.startswith(rule.outside)]
        for number, text in sorted(prose_of(ROOT / name)):
            for rule in applied:
                for use in rule.uses(text):
                    found += 1
                    print(f"{name}:{number}: {use!r}: say {rule.say}\n    {text}")
    print(f"{found} words to replace" if found else "no words to replace")
    return found > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
