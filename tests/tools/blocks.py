"""
Check that the blocks which scripts share, from "# --- NAME (same in ...)" to "# --- end of NAME",
are the same in all of them; with --fix, copy each from the first script that has it.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [*sorted(ROOT.glob("0[1-6]_*.py")), ROOT / "recipes/tools/kit.py"]
BLOCK = re.compile(r"^# --- (.+) \(same in .+\)\n.*?^# --- end of \1\n", re.DOTALL | re.MULTILINE)


def blocks_of(text):
    """Return {name: block}, markers included."""
    return {match[1]: match[0] for match in BLOCK.finditer(text)}


def with_blocks(text, blocks):
    """Return text with each of its blocks replaced by the one of the same name in blocks."""
    return BLOCK.sub(lambda match: blocks[match[1]], text)


def main(fix):
    first = {}
    differences = []
    for path in SCRIPTS:
        text = path.read_text(encoding="utf-8")
        first = blocks_of(text) | first
        for name, block in blocks_of(text).items():
            if block != first[name]:
                differences.append(f"{path.name}: {name}")
        if fix:
            path.write_text(with_blocks(text, first), encoding="utf-8")
    if differences:
        print("\n".join(differences))
    else:
        print("all blocks are the same")
    return bool(differences) and not fix


if __name__ == "__main__":
    sys.exit(main("--fix" in sys.argv))
