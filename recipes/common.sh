# What the recipes share; each begins with: . "$(dirname "$0")/common.sh" NAME-OF-ITS-DATA-SET
#
#   DATA=FOLDER     other data than the system's own
#   WORK=FOLDER     where all that is made goes; by default work/DATA/RECIPE
#   DEPTH=N         how many candidates a claim go to the cross-encoders, where the paper's number costs too much
#   SMALL=1         a rehearsal: small weights in place of the large, and little work (see small)
#   SMALL=weights   small weights, but all the work
#   LLM_BASE_URL, LLM_MODEL, OPENAI_API_KEY     the endpoint that language models are asked at
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export TQDM_MININTERVAL=1  # a sign of life every second or so, also where there is no terminal
DATA=${DATA:-data/$1} SMALL=${SMALL:-}
WORK=${WORK:-work/$(basename "$DATA")/$(basename "$0" .sh)}
case $DATA$WORK in *[[:space:]]*) echo "error: DATA, WORK: a blank in '$DATA' or '$WORK'; take paths without" >&2; exit 2 ;; esac
D="--data $DATA --work $WORK"
T=$WORK/test

stage() { printf '\n------------------------------------------------------------ %s\n' "$1"; }

# model LARGE SMALL: the model to take; with SMALL, what stands for which is said
model() {
  if [ -z "$SMALL" ]; then echo "$1"; return; fi
  echo "small: $2 stands for $1" >&2
  echo "$2"
}

# small FLAGS: flags that cut the work down, for SMALL=1 only; as they come last on a line, they win
small() { if [ "$SMALL" = 1 ]; then echo "$@"; fi; }

# llm NAME [TOKENS]: flags for a language model at the endpoint; with SMALL and no endpoint, the packaged one answers in this
# process, in no more than so many tokens
llm() {
  if [ -z "$SMALL" ]; then
    if [ -n "${LLM_BASE_URL:-}${OPENAI_API_KEY:-}" ]; then echo "--backend openai --model $1"; return; fi
    echo "error: LLM_BASE_URL: $1 will be asked, hours from now; set it, or OPENAI_API_KEY, before the recipe begins" >&2
    exit 2
  fi
  if [ -n "${LLM_BASE_URL:-}${OPENAI_API_KEY:-}" ]; then
    echo "small: ${LLM_MODEL:=$1} at the endpoint stands for $1" >&2
    echo "--backend openai --model $LLM_MODEL"
  else
    echo "small: data/models/smollm2 in this process stands for $1" >&2
    echo "--backend transformers --model data/models/smollm2 --max-words 40 ${2:+--max-tokens $2}"
  fi
}

MINILM=data/models/minilm
SPLADE_TINY=data/models/splade-tiny
CROSS=work/small/cross-encoder
if [ -n "$SMALL" ]; then
  python data/download.py models
  [ -d $CROSS ] || python recipes/stand_in.py $CROSS
fi
