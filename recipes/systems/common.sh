# Shared by the recipes; each reads this file first, with the name of its data set.
# Each makes the run that was submitted, or that its paper calls best. With the word tables, it
# goes on with further rows of the paper's tables.
# Relative paths count from the repository's root.
#
#   DATA=FOLDER     another data set (default: the system's own)
#   WORK=FOLDER     folder for everything that is made (default: work/DATA/RECIPE)
#                   (where a cluster sets WORK or DATA for its users: unset WORK DATA)
#   DEPTH=N         candidates per claim for cross-encoders, where the paper's number costs too much
#                   (ant_bridge, climatesense_2026, kiepura_lam, checkthat_2026, sourcesniffers,
#                   verirel)
#   SMALL=1         a rehearsal within minutes: small models, short texts, few candidates
#                   (README.md has what it sets)
#   LLM_BASE_URL    endpoint of the language model
#   OPENAI_API_KEY  its key; without LLM_BASE_URL, OpenAI is asked
#   LLM_MODEL=NAME  ask this model there, in place of the paper's; without it, a rehearsal asks no
#                   endpoint
#   RERANK_BASE_URL rerank endpoint of models that need code of their own, such as
#                   http://localhost:8001/v1 of vLLM; without it, their rows are left out
#                   (kvist_2026.sh: another reranker takes its place); a rehearsal asks it, too
#   PIECE=N         requests that vLLM answers in a call (default: 500)
#   VLLM="FLAGS"    more flags of vllm run-batch
#   FROM=PATH       small.sh, variants.sh: a local copy of the published files of their data set
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

refuse() {
  echo "error: $*" >&2
  exit 2
}

SMALL=${SMALL:-}
DATA=${DATA:-}
DATA=${DATA%/}  # data/scifact/ means data/scifact
WORK=${WORK:-}
if [[ ! $SMALL =~ ^1?$ ]]; then
  refuse "SMALL: '$SMALL'; give 1, or nothing"
fi
if [[ $DATA$WORK =~ [[:space:]] ]]; then
  refuse "DATA, WORK: a space in '$DATA' or '$WORK'"
fi
if [ -n "$DATA" ] && [ ! -d "$DATA" ]; then
  refuse "DATA: no folder '$DATA'; fetch it with data/download.py"
fi
SYSTEM=$(basename "$0" .sh)
DATA=${DATA:-data/$1}
WORK=${WORK:-work/$(basename "$DATA")/$SYSTEM}
D="--data $DATA --work $WORK"  # flags that all scripts have
T=$WORK/test                   # runs on the test split
QRELS=$DATA/qrels.test.tsv
PROMPTS=recipes/systems/prompts

# -------------------- Stages
# stage HEADING: the heading of a stage
stage() {
  printf '\n------------------------------------------------------------ %s\n' "$1"
}

# kit SCRIPT FLAGS: run a script. In a rehearsal, flags that set the amount of its work come last,
# and win.
kit() {
  python "$@" $(reduced "$1" "$2")
}

# reduced SCRIPT JOB: the flags that a rehearsal sets
reduced() {
  if [ -z "$SMALL" ]; then
    return
  fi
  local two="--fields title,abstract"  # the demo has no others
  case "$1 $2" in
    "01_index.py graph") ;;
    "recipes/train/encoder.py "*) echo $two --epochs 0.25 --max-length 48 --batch-size 16 ;;
    "01_index.py "*) echo $two --max-length 64 ;;
    "recipes/train/reranker.py "*) echo $two --epochs 0.25 --max-length 96 ;;
    "03_rerank.py "*) echo $two --depth 10 --max-length 96 ;;
    "04_llm_rerank.py "*) echo $two --depth 5 --max-words 40 ;;
    "recipes/train/classifier.py "*) echo --epochs 1 --max-length 96 ;;
    "05_classify.py llm") echo --max-words 40 ;;
    "05_classify.py "*) echo --max-length 96 ;;
    "recipes/tools/fewshot.py "*) echo --number 1 ;;
  esac
}

# few WORDS: the words of a loop; in a rehearsal, the first alone
few() {
  if [ -n "$SMALL" ]; then
    echo "$1"
  else
    echo "$@"
  fi
}

# -------------------- Data
# fetch NAME: download scifact, check-covid or climate-fever, or read the copy in $FROM. The labels
# of SciFact's test split are not public: its dev split is test, and dev comes out of train.
fetch() {
  local name=$1
  if [[ ! $name =~ ^(scifact|check-covid|climate-fever)$ ]]; then
    return
  fi
  if [ ! -d data/$name ]; then
    python data/download.py $name ${FROM:+--from "$FROM"}
  fi
  if [ $name = scifact ]; then
    python data/download.py split data/scifact --share 0.15 --test dev
  fi
}

# abstracts: from here on the data have no titles; the systems of ClimateCheck read none
abstracts() {
  python recipes/tools/texts.py $DATA $WORK/abstracts
  DATA=$WORK/abstracts
  D="--data $DATA --work $WORK"
}

# -------------------- Models
MINILM=data/models/minilm
SPLADE_TINY=data/models/splade-tiny
CROSS=work/small/cross-encoder
CAUSAL=work/small/causal
NLI=work/small/nli
if [ -n "$SMALL" ]; then
  python data/download.py models
fi

# model LARGE SMALL: the model to use; what stands in work/small/ is made on the first call. It is
# called in $( ), where set -e does not hold: a failure needs an exit of its own.
model() {
  local large=$1 small=$2
  if [ -z "$SMALL" ]; then
    echo "$large"
    return
  fi
  echo "small: $small replaces $large" >&2
  if [[ $small = work/small/* && ! -d $small ]]; then
    python recipes/tools/stand_in.py $small --kind $(basename $small) >&2 || exit 2
  fi
  echo "$small"
}

# llm NAME: flags for the language model at the endpoint. With SMALL, an endpoint is asked only for
# LLM_MODEL, as answers may cost money; else a stand-in gives every prompt the same reply.
llm() {
  local name=$1
  local model=${LLM_MODEL:-}
  local reachable=no
  if [ -n "${LLM_BASE_URL:-}" ]; then
    reachable=yes
  fi
  if [[ -n ${OPENAI_API_KEY:-} && (-n $model || $name = gpt-*) ]]; then
    reachable=yes  # at OpenAI
  fi
  if [ -z "$SMALL" ]; then
    model=${model:-$name}
  fi
  if [[ -n $model && $reachable = yes ]]; then
    echo "--backend openai --model $model"
  elif [ -n "$SMALL" ]; then
    model=$(model $name work/small/llm) || exit 2
    echo "--backend transformers --model $model"
  else
    refuse "LLM_BASE_URL: not set, and $name will be asked;" \
      "set it (OPENAI_API_KEY alone means OpenAI)"
  fi
}

# translate SPLIT FLAGS: its French and German posts in English, by $TRANSLATOR. What no reply can
# be read for is asked once more. Flags are for recipes/rewrite.py, which only writes the requests:
# 04 answers them, since in a rehearsal a local model does, even if LLM_BASE_URL is set.
translate() {
  local split=$1 status round
  local view=$WORK/$split/claims.translation
  local name=${TRANSLATOR##* }  # the last word of --backend WHAT --model NAME
  shift
  for round in 1 2 3; do
    status=0
    python recipes/rewrite.py $D --split $split --view translation --languages fr de \
      --model $name --base-url "" --max-tokens 256 --out $view.tsv "$@" || status=$?
    if [ $status != 3 ]; then  # 3: requests wait
      return $status
    fi
    python 04_llm_rerank.py ask $view.requests.jsonl --replies $view.replies.jsonl $TRANSLATOR
  done
  refuse "$view.replies.jsonl: the same requests wait again and again; see its last lines"
}

# ask OUT COMMAND: a stage of 04 or 05 that writes OUT.tsv. Both end with status 3 while requests
# wait, as with --backend none. Then vLLM answers: $JUDGE is the model, $VLLM more flags. It gets
# $PIECE requests a call, as it writes replies only at its end: if a call is killed, one piece is
# lost. The default of 500 is a trade-off, since each call loads the model. A reply that cannot be
# read is asked for again: there are at most 5 rounds.
ask() {
  local out=$1 round status piece
  shift
  for round in 1 2 3 4 5; do
    status=0
    "$@" --out $out.tsv || status=$?
    if [ $status = 0 ]; then
      return
    elif [ $status != 3 ]; then
      exit $status
    fi
    rm -f $out.piece.*
    split -l ${PIECE:-500} $out.requests.jsonl $out.piece.
    for piece in $out.piece.*; do
      vllm run-batch -i $piece -o $out.new.jsonl --model $JUDGE ${VLLM:-}
      cat $out.new.jsonl >> $out.replies.jsonl
      rm $piece $out.new.jsonl
    done
  done
  refuse "$out.replies.jsonl: the same requests wait again and again; see its last lines"
}

# -------------------- Tables
# judged QRELS: whether these judgements are there; if not, say so
judged() {
  if [ ! -e $1 ]; then
    echo "no table without $1, which the organisers keep (data/README.md)"
    return 1
  fi
}

# table NAME MEASURES RUNS: the table NAME.tsv, and beside it the published figures of the system's
# first table, or of $PUBLISHED; where the test split has judgements
table() {
  local name=$1 measures=$2
  shift 2
  if ! judged $QRELS; then
    return
  fi
  python 06_evaluate.py $D "$@" --measures $measures --out $T/$name.tsv
  python recipes/tools/published.py $T/$name.json "${PUBLISHED:-$SYSTEM}"
}

# check WORD QRELS: before the first stage, refuse words but tables, and tables without judgements
check() {
  local word=$1 qrels=${2:-$QRELS}
  if [ -z "$word" ]; then
    return
  fi
  if [ "$word" != tables ]; then
    refuse "$word: not known; give the word tables, or none"
  fi
  if [ ! -e $qrels ]; then
    refuse "tables: they need $qrels, which the organisers keep (data/README.md)"
  fi
}

# further WORD: end the recipe here, unless it was called with the word tables
further() {
  if [ "$1" != tables ]; then
    exit 0
  fi
}

# dev_or_test: set SPLIT, the split of further tables, and S, the folder of its runs
dev_or_test() {
  SPLIT=dev
  if [ ! -e $DATA/qrels.dev.tsv ]; then
    echo "there is no $DATA/qrels.dev.tsv: the next tables are of test"
    SPLIT=test
  fi
  S=$WORK/$SPLIT
}

# checkthat_task: the submission of CheckThat!; posts in several languages have a list for each
checkthat_task() {
  if head -n 1 $DATA/claims.test.tsv | grep -q language; then
    echo checkthat2026
  else
    echo checkthat4b
  fi
}

# remarks: the published figures that no run here stands for, why, and the slips of the papers
remarks() {
  stage "tables  Published figures without a run here, and slips of the papers"
  python recipes/tools/published.py --remarks "$SYSTEM"
}
