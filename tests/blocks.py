"""
Check that blocks which several scripts share are the same in all of them.

Reads   the six scripts; a block stands between "# --- NAME (same in ...)" and "# --- end of NAME"
Writes  --fix: the scripts, with the block of the first script that has it
Prints  the blocks that differ, each with its scripts

Examples
    python tests/blocks.py
    python tests/blocks.py --fix
"""
import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^# --- (.+) \(same in .+\)\n.*?^# --- end of \1\n", re.DOTALL | re.MULTILINE)

def blocks_of(text):
    """Return {name: block}, markers included."""
    return {found[1]: found[0] for found in BLOCK.finditer(text)}

def with_blocks(text, blocks):
    """Return text with each of its blocks replaced by the one of the same name in blocks."""
    return BLOCK.sub(lambda found: blocks[found[1]], text)

def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fix", action="store_true", help="copy each block from its first script")
    args = parser.parse_args()
    first, differ = {}, []
    for path in sorted(ROOT.glob("0[1-6]_*.py")):
        text = path.read_text(encoding="utf-8")
        first = blocks_of(text) | first
        for name, block in blocks_of(text).items():
            if block != first[name]:
                differ.append(f"{path.name}: {name}")
        if args.fix:
            path.write_text(with_blocks(text, first), encoding="utf-8")
    print(*differ or ["all blocks are the same"], sep="\n")
    sys.exit(bool(differ) and not args.fix)

if __name__ == "__main__":
    main()
