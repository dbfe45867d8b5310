# Shared by the recipes; each begins with: . "$(dirname "$0")/common.sh" DATASET
# Each makes the run that was submitted, or that its paper calls best; bash recipes/X.sh tables
# goes on with further rows of the paper's tables.
#
#   DATA=FOLDER     another data set (default: the system's own)
#   WORK=FOLDER     folder for everything that is made (default: work/DATA/RECIPE)
#   DEPTH=N         candidates per claim for cross-encoders, where the paper's number costs too much
#   SMALL=1         a rehearsal within minutes: small models, short texts, few candidates
#   SMALL=weights   small models, but the full amount of work
#   LLM_BASE_URL    endpoint of the language model
#   OPENAI_API_KEY  its key; alone it means OpenAI
#   LLM_MODEL=NAME  the model asked there, in place of the paper's; a rehearsal asks no other
#   PIECE=N         requests that vLLM answers in a call (default: 500)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
refuse() { echo "error: $*" >&2; exit 2; }
case ${SMALL:=} in ""|1|weights) ;; *) refuse "SMALL: '$SMALL'; give 1, weights, or nothing" ;; esac
case ${DATA:=}${WORK:=} in *[[:space:]]*)
  refuse "DATA, WORK: a space in '$DATA' or '$WORK'" ;; esac
[ -z "$DATA" ] || [ -d "$DATA" ] || refuse "DATA: no folder '$DATA'; fetch it with data/download.py"
DATA=${DATA:-data/$1}
WORK=${WORK:-work/$(basename "$DATA")/$(basename "$0" .sh)}
D="--data $DATA --work $WORK"
T=$WORK/test
QRELS=$DATA/qrels.test.tsv
SYSTEM=$(basename "$0" .sh)

stage() { printf '\n------------------------------------------------------------ %s\n' "$1"; }

# fetch NAME: download scifact, check-covid or climate-fever, or read the copy in $FROM. The labels
# of SciFact's test split are not public: its dev split is test, and dev comes out of train.
fetch() {
  case $1 in scifact | check-covid | climate-fever) ;; *) return ;; esac
  [ -d data/$1 ] || python data/download.py $1 ${FROM:+--from "$FROM"}
  [ $1 != scifact ] || python data/download.py split data/scifact --share 0.15 --test dev
}

# abstracts: from here on the data have no titles; ClimateCheck's papers read abstracts alone
abstracts() {
  python recipes/tools/texts.py $DATA $WORK/abstracts
  DATA=$WORK/abstracts
  D="--data $DATA --work $WORK"
}

# model LARGE SMALL: the model to use; what stands in work/small/ is made on the first call
model() {
  if [ -z "$SMALL" ]; then echo "$1"; return; fi
  echo "small: $2 replaces $1" >&2
  case $2 in work/small/*)
    [ -d $2 ] || python recipes/tools/stand_in.py $2 --kind $(basename $2) >&2 ;; esac
  echo "$2"
}

# small FLAGS: flags that reduce the work with SMALL=1; as the last ones on a line, they win
small() { if [ "$SMALL" = 1 ]; then echo "$@"; fi; }

# few WORDS: a loop's words; with SMALL=1 the first alone
few() { if [ "$SMALL" = 1 ]; then echo "$1"; else echo "$@"; fi; }

# llm NAME: flags for the language model at the endpoint. With SMALL, an endpoint is asked only for
# LLM_MODEL, as answers may cost money; else a stand-in gives every prompt the same reply.
llm() {
  local model=${LLM_MODEL:-} there=${LLM_BASE_URL:-}
  if [[ -n $model || $1 = gpt-* ]]; then there=$there${OPENAI_API_KEY:-}; fi
  if [ -z "$SMALL" ]; then model=${model:-$1}; fi
  if [[ -n $model && -n $there ]]; then
    echo "--backend openai --model $model"
  elif [ -n "$SMALL" ]; then
    echo "--backend transformers --model $(model $1 work/small/llm)"
  else
    refuse "LLM_BASE_URL: not set, and $1 will be asked; set it (OPENAI_API_KEY alone means OpenAI)"
  fi
}

# ask OUT COMMAND: a stage of 04 or 05 that writes OUT.tsv. With --backend none vLLM answers its
# requests: $JUDGE is the model, $VLLM more flags. Each round of questions is written anew.
# vLLM writes replies only at its end, so it gets $PIECE requests at a time: what a session that
# ends loses is one piece. 500 is a trade-off, since the model is loaded for each piece.
ask() {
  for round in 1 2 3 4 5; do
    local status=0
    "${@:2}" --out $1.tsv || status=$?
    case $status in 0) return ;; 3) ;; *) exit $status ;; esac
    rm -f $1.piece.*
    split -l ${PIECE:-500} $1.requests.jsonl $1.piece.
    for piece in $1.piece.*; do
      vllm run-batch -i $piece -o $1.new.jsonl --model $JUDGE ${VLLM:-}
      cat $1.new.jsonl >> $1.replies.jsonl
      rm $piece $1.new.jsonl
    done
  done
  refuse "$1.replies.jsonl: the same requests wait again and again; see its last lines"
}

# table MEASURES RUNS: the table with the published figures of $SYSTEM, where the test split has
# judgements
table() {
  local word last= out=$T/metrics.tsv
  for word in "$@"; do
    if [ "$last" = --out ]; then out=$word; fi
    last=$word
  done
  if [ -e "$QRELS" ]; then
    python 06_evaluate.py $D "${@:2}" --measures $1
    python recipes/tools/published.py ${out%.tsv}.json "$SYSTEM"
  else
    echo "no table without $QRELS, which the organisers keep (data/README.md)"
  fi
}

# further WORD QRELS: end the recipe here, unless it was called with the word tables
further() {
  [ "$1" = tables ] || exit 0
  local qrels=${2:-$QRELS}
  [ -e $qrels ] || refuse "tables: they need $qrels, which the organisers keep (data/README.md)"
}

# remarks: the published figures that no run here stands for, why, and the slips of the papers
remarks() {
  stage "tables  Published figures without a run here, and slips of the papers"
  awk -F '\t' -v name="$SYSTEM" '$1 == name && $8 != "" {
    head = $2 ", " $3 " (" $6 "; " $8 ")"
    printf head == last ? ", " : "\n%s\n  ", head
    printf "%s %s", $4, $5
    last = head
  } END { print "" }' recipes/published.tsv
}

MINILM=data/models/minilm
SPLADE_TINY=data/models/splade-tiny
CROSS=work/small/cross-encoder
CAUSAL=work/small/causal
NLI=work/small/nli
[ -z "$SMALL" ] || python data/download.py models
