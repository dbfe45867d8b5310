#!/usr/bin/env bash
# One claim against any index: a verdict, and the abstracts behind it with stance, probability and, where a classifier is
# at hand, the sentence of each piece of evidence that counts most.
#
#   bash recipes/check_claim.sh "Polar bears are thriving"
#   bash recipes/check_claim.sh --json --data data/mine --work work/mine "Polar bears are thriving"
#
#   --json      one JSON object on stdout, for programs
#   --data DIR  folder of corpus.jsonl (data/demo)
#   --work DIR  folder of index/ and models/ (work/demo); what is made goes to checked/ there
#   --top K     abstracts that are judged, 1 to 100 (5)
#   --          the next word is the claim, even if it begins with a dash
#
# Paths start at the repository's root. Every index that is there is asked, and models/reranker, where there is one, has a say
# in the order. Stance comes from LLM_MODEL where LLM_BASE_URL or OPENAI_API_KEY is set (at OpenAI gpt-4.1 by default), else
# from models/classifier, which picks the evidence sentences, too. A claim asked again is answered from what was made.
set -euo pipefail
cd "$(dirname "$0")/.."
fail() { printf 'error: %s\n' "$(printf '%s: %s' "$1" "$2" | tr '[:cntrl:]' ' ')" >&2; exit 2; }

JSON="" DATA=data/demo WORK=work/demo TOP=5 CLAIM="" CLAIMS=0
while [ $# -gt 0 ]; do
  case $1 in
    --help) sed -n '2,/^set/s/^# \{0,1\}//p' recipes/check_claim.sh; exit ;;
    --json) JSON=1 ;;
    --data | --work | --top | --)
      [ $# -gt 1 ] || fail "$1" "nothing follows it; see --help"
      case $1 in --data) DATA=$2 ;; --work) WORK=$2 ;; --top) TOP=$2 ;; *) CLAIM=$2 CLAIMS=$((CLAIMS + 1)) ;; esac
      shift ;;
    -*) fail "$1" "unknown option; see --help, and write -- before a claim that begins with a dash" ;;
    *) CLAIM=$1 CLAIMS=$((CLAIMS + 1)) ;;
  esac
  shift
done
[ $CLAIMS != 0 ] || fail check_claim.sh "no claim is given; write one in quotes"
[ $CLAIMS = 1 ] || fail check_claim.sh "$CLAIMS claims are given; put the claim in quotes, and check one at a time"
case $TOP in [1-9] | [1-9][0-9] | 100) ;; *) fail --top "'$TOP' is no whole number from 1 to 100; take --top 5" ;; esac
[ -f "$DATA/corpus.jsonl" ] || fail "$DATA/corpus.jsonl" "no such file; give the folder of the abstracts with --data"
KINDS=() LLM=${LLM_BASE_URL:-}${OPENAI_API_KEY:-} CLASSIFIER=$WORK/models/classifier
for kind in bm25 dense splade; do if [ -d "$WORK/index/$kind" ]; then KINDS+=("$kind"); fi; done
[ ${#KINDS[@]} != 0 ] || fail "$WORK/index" "no index there; run 01_index.py or, for the demo's, bash recipes/demo.sh"
[ -n "$LLM" ] || [ -d "$CLASSIFIER" ] ||
  fail "$CLASSIFIER" "no classifier there; run 05_classify.py train, or set LLM_BASE_URL and LLM_MODEL"
[ -n "${LLM_BASE_URL:-}" ] || export LLM_MODEL="${LLM_MODEL:-gpt-4.1}"
[ -n "${LLM_MODEL:-}" ] || fail LLM_MODEL "it is not set; name a model of the endpoint at LLM_BASE_URL"

# ---- A folder for this claim alone, named by its hash: several can be checked at once. To Python a claim is data, never code.
ID=$(python -c '
import csv, hashlib, os, pathlib, re, sys
claim = os.fsencode(sys.argv[2]).decode("utf-8", "replace")
claim = " ".join(re.sub(r"(\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|[\x00-\x1f\x7f-\x9f]", " ", claim).split())  # no escape codes
if not claim:
    sys.exit(print("error: check_claim.sh: the claim is empty; write one in quotes", file=sys.stderr) or 2)
name = hashlib.sha256(claim.encode()).hexdigest()[:16]
folder = pathlib.Path(sys.argv[1], "checked", name)
folder.mkdir(parents=True, exist_ok=True)
with open(folder / f"claims.tmp-{os.getpid()}", "w", encoding="utf-8", newline="") as file:
    csv.writer(file, delimiter="\t", lineterminator="\n").writerows([("claim_id", "claim"), (name, claim)])
os.replace(file.name, folder / "claims.test.tsv")  # whole, as another check of this claim may be reading it
print(name)' "$WORK" "$CLAIM")
DIR=$WORK/checked/$ID
D=(--data "$DATA" --work "$WORK" --claims "$DIR/claims.test.tsv")

# ---- What the scripts say goes to a log. Where one fails, its error line is shown and its exit status kept.
trap 'exit 130' INT
printable() { python -c 'import sys
sys.stdin.reconfigure(encoding="utf-8", errors="replace")
print("".join(one for one in sys.stdin.read() if one.isprintable() or one in "\n\t"), end="")'; }
step() {
  local log="$DIR/${2%.py}.log" status
  if [ -t 2 ]; then echo "$2 ..." >&2; fi
  "$@" > "$log" 2>&1 || { status=$?; { grep -a '^error: ' "$log" || tail -n 20 "$log"; } | printable >&2; exit $status; }
}
step python 02_retrieve.py "${D[@]}" --retrievers "${KINDS[@]}" --out "$DIR"
if [ ${#KINDS[@]} = 1 ]; then RUN=$DIR/${KINDS[0]}.tsv; else RUN=$DIR/hybrid.tsv; fi
if [ -d "$WORK/models/reranker" ]; then
  step python 03_rerank.py "${D[@]}" --run "$RUN" --depth $((TOP > 20 ? TOP : 20)) --first-stage 0.8 --out "$DIR/rerank.tsv"
  RUN=$DIR/rerank.tsv
fi
if [ -z "$LLM" ]; then
  OUT=$DIR/verdicts.$TOP BY=(--model "$CLASSIFIER")
else
  OUT=$DIR/llm_verdicts.$TOP BY=(llm --backend openai --cache "$DIR/llm.replies.jsonl")
  if [ -d "$CLASSIFIER" ]; then BY+=(--evidence-model "$CLASSIFIER"); fi
fi
step python 05_classify.py "${BY[@]}" "${D[@]}" --run "$RUN" --top-k "$TOP" --out "$OUT.tsv" --aggregate "$OUT.jsonl"

# ---- The answer, in JSON as it is; to a terminal goes nothing that it would obey, as claims and abstracts come from anywhere.
python - "$OUT" "$DATA/corpus.jsonl" "$JSON" <<'PY'
import csv, json, os, re, shutil, sys, textwrap, unicodedata
out, corpus, as_json = sys.argv[1:]
sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")  # a lone surrogate: JSON has an escape for it

answer, made = (json.load(open(f"{out}{ending}", "rb")) for ending in (".jsonl", ".tsv.meta.json"))
rows = list(csv.DictReader(open(f"{out}.tsv", encoding="utf-8", newline=""), delimiter="\t"))
records = {row["abstract_id"]: {} for row in rows}
for line in open(corpus, "rb"):
    record = json.loads(line) if line.strip() and rows else {}
    if str(record.get("abstract_id")) in records:
        records[str(record["abstract_id"])] = record
sentences = {one["abstract_id"]: one["sentence"] for one in answer.pop("evidence", [])}
answer |= {"judge": made["arguments"]["model"], "unusable": made.get("unusable", 0), "abstracts": [
    {"abstract_id": row["abstract_id"], "rank": int(row["rank"]), "title": str(records[row["abstract_id"]].get("title") or ""),
     "label": row["label"], **{name: float(row[name]) for name in ("p_supports", "p_refutes", "p_nei")},
     "probability": float(row[f"p_{row['label'].lower()}"]), "sentence": sentences.get(row["abstract_id"])} for row in rows]}
if as_json:
    sys.exit(print(json.dumps(answer, ensure_ascii=False)))

width = min(100, max(40, shutil.get_terminal_size().columns))
colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ

def show(head, text, word=None):
    """Wrapped under its head, without escape codes and control characters; word comes in colour."""
    text = " ".join(re.sub(r"(\x1b\[|\x9b)[0-?]*[ -/]*[@-~]", "", text).split())
    text = "".join(one for one in text if unicodedata.category(one)[0] != "C")
    text = textwrap.fill(text, width, initial_indent=head, subsequent_indent=" " * len(head)) or head
    code = {"S": 32, "R": 31, "D": 33}.get(word[0], 2) if word and colours else None
    print(text.replace(word, f"\033[{code}m{word}\033[0m", 1) if code else text)

show("Claim    ", answer["claim"])
show("Verdict  ", "{verdict} (SUPPORTS {SUPPORTS}, REFUTES {REFUTES}, NEI {NEI})".format(**answer), answer["verdict"])
unusable = f"; replies that name no label and count as NEI: {answer['unusable']}" if answer["unusable"] else ""
show("Judge    ", (answer["judge"] if rows else "none, as no index knows a word of the claim") + unusable)
for one in answer["abstracts"]:
    title, sentence = one["title"], one["sentence"] or ""
    print()
    show(f"{one['rank']:>2}  {one['label']:8} {100 * one['probability']:3.0f} %  ", title or
         textwrap.shorten(str(records[one["abstract_id"]].get("abstract") or ""), 160), one["label"])
    if sentence:
        show("    ", sentence)
    show("    ", one["abstract_id"])
PY
