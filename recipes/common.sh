# What the recipes share; each begins with: . "$(dirname "$0")/common.sh" NAME-OF-ITS-DATA-SET
#
#   DATA=FOLDER     other data than the system's own
#   WORK=FOLDER     where all that is made goes; by default work/DATA/RECIPE
#   DEPTH=N         how many candidates a claim go to the cross-encoders of ant_bridge, climatesense_2026 and kiepura_lam,
#                   where the paper's number costs too much
#   SMALL=1         a rehearsal: small weights in place of the large, and little work (see small)
#   SMALL=weights   small weights, but all the work
#   LLM_BASE_URL, OPENAI_API_KEY     the endpoint that language models are asked at, and its key; a key alone asks OpenAI
#   LLM_MODEL=NAME  the model asked there in place of the paper's, or what the endpoint calls it
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export TQDM_MININTERVAL=1  # a sign of life every second or so, also where there is no terminal
refuse() { echo "error: $*" >&2; exit 2; }
case ${SMALL:=} in ""|1|weights) ;; *) refuse "SMALL: '$SMALL' is neither 1 nor weights; leave it out for the system" ;; esac
case ${DATA:=}${WORK:=} in *[[:space:]]*) refuse "DATA, WORK: a blank in '$DATA' or '$WORK'; take paths without" ;; esac
[ -z "$DATA" ] || [ -d "$DATA" ] || refuse "DATA: no folder '$DATA'; leave it out for the system's own data"
DATA=${DATA:-data/$1}
WORK=${WORK:-work/$(basename "$DATA")/$(basename "$0" .sh)}
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
  local there=${LLM_BASE_URL:-}  # a key alone asks OpenAI, which has its own models, or the one that LLM_MODEL names
  case ${LLM_MODEL:-$1} in gpt-* | "${LLM_MODEL:-}") there=$there${OPENAI_API_KEY:-} ;; esac
  if [ -n "$there" ]; then
    [ -z "${LLM_MODEL:-}" ] || echo "${SMALL:+small: }$LLM_MODEL at the endpoint stands for $1" >&2
    echo "--backend openai --model ${LLM_MODEL:-$1}"
  elif [ -n "$SMALL" ]; then
    echo "small: data/models/smollm2 in this process stands for $1" >&2
    echo "--backend transformers --model data/models/smollm2 --max-words 40 ${2:+--max-tokens $2}"
  else
    refuse "LLM_BASE_URL: $1 will be asked, hours from now; set it before the recipe begins (OPENAI_API_KEY alone asks OpenAI)"
  fi
}

MINILM=data/models/minilm
SPLADE_TINY=data/models/splade-tiny
CROSS=work/small/cross-encoder
if [ -n "$SMALL" ]; then
  python data/download.py models
  [ -d $CROSS ] || python recipes/stand_in.py $CROSS
fi
