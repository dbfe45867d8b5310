#!/usr/bin/env bash
# Retrievers and rerankers side by side on one data set, one line each: recall, nDCG@10, seconds,
# GPU memory, equal scores, significance against the first line.
# A model that fails is a line with its error. The next call makes only what is missing or changed.
#   RETRIEVERS="bm25 Qwen/Qwen3-Embedding-0.6B splade:naver/splade-v3" \
#   MODELS="BAAI/bge-reranker-v2-m3 Qwen/Qwen3-Reranker-0.6B" DATA=data/mine bash recipes/compare.sh
# Rehearsal within minutes, 160 tokens of texts and pairs, 20 candidates:
#   DATA=data/demo SMALL=1 bash recipes/compare.sh
# Without DATA: SciFact, Check-COVID and CLIMATE-FEVER, each retriever by default the packaged one.
# To get them from local copies, call data/download.py NAME --from PATH first.
#
#   RETRIEVERS="NAMES"  bm25, encoders, splade:MODEL (default: bm25, and none with RUN; without DATA
#                       and with SMALL also the packaged encoder and SPLADE model)
#   MODELS="NAMES"      rerankers (default: none; with SMALL two stand-ins)
#   SPLIT=NAME          whose claims (default: test)
#   RUN=FILE            candidates (default: reciprocal rank fusion of the retrievers)
#   DEPTH=N             candidates per claim (default: 100)
#   MEASURES="R@5 RR"   of 06_evaluate.py (default: R@2 R@5 R@10 nDCG@10)
#   FLAGS="FLAGS"       of 01_index.py and 03_rerank.py, as --device cuda:0 cuda:1 --max-length 1024
if [ -z "${DATA:-}" ]; then
  OWN=${WORK:-}${FROM:-}
  . "$(dirname "$0")/systems/common.sh" demo
  if [ -n "$OWN" ]; then
    refuse "WORK, FROM: three data sets cannot share '$OWN'; give DATA, too"
  fi
  python data/download.py models
  export RETRIEVERS=${RETRIEVERS:-bm25 $MINILM splade:$SPLADE_TINY}
  for set in scifact check-covid climate-fever; do fetch $set; done
  DATA=data/scifact-split SPLIT=test-cited bash recipes/compare.sh  # judged as in BEIR
  DATA=data/check-covid bash recipes/compare.sh
  DATA=data/climate-fever bash recipes/compare.sh
  exit
fi
. "$(dirname "$0")/systems/common.sh" demo
SPLIT=${SPLIT:-test}
T=$WORK/$SPLIT
if [ ! -e $DATA/qrels.$SPLIT.tsv ]; then
  refuse "DATA: no $DATA/qrels.$SPLIT.tsv, so nothing can be compared"
fi
if [ -n "$SMALL" ]; then
  FLAGS=${FLAGS:---max-length 160}
  DEPTH=${DEPTH:-20}
  RETRIEVERS=${RETRIEVERS:-bm25 $MINILM splade:$SPLADE_TINY}
  MODELS=${MODELS:-$(model "a cross-encoder" $CROSS) $(model "a causal reranker" $CAUSAL)}
fi
DEPTH=${DEPTH:-100}
RUN=${RUN:-}
if [ -z "$RUN" ]; then
  RETRIEVERS=${RETRIEVERS:-bm25}
fi
runs=($RUN)
rows=""  # a model's row, which is also the name of its files

# try NAME COMMAND: run it and keep in rows/NAME.json what it took, or its error
try() {
  local name=$1 status=0
  shift
  python recipes/tools/compare.py run $WORK/rows/$name.json "$@" || status=$?
  if [ $status = 130 ]; then  # Ctrl-C
    exit 130
  fi
  return $status
}

# retrieve NAME KIND FLAGS: the index of a retriever, and its run
retrieve() {
  local name=$1 kind=$2
  shift 2
  try $name.index python 01_index.py $D --indexes $kind "$@" ${FLAGS:-} --out $WORK/index/$name &&
    try $name python 02_retrieve.py $D --split $SPLIT --retrievers $kind --index $WORK/index/$name \
      --top-k $DEPTH --out $T/$name
}

stage "1, 2  Every retriever: its index, and its best $DEPTH"
for name in ${RETRIEVERS:-}; do
  as=${name//[\/:]/_}
  rows="$rows $as"
  case $name in
    bm25)
      kind=bm25
      flags="" ;;
    splade:*)
      kind=splade
      flags="--splade-model ${name#splade:}" ;;
    *)
      kind=dense
      flags="--dense-model $name" ;;
  esac
  if retrieve $as $kind $flags; then
    cp $T/$as/$kind.tsv $T/$as.tsv
    cp $T/$as/$kind.tsv.meta.json $T/$as.tsv.meta.json
    runs+=($T/$as.tsv)
  fi
done
if [ ${#runs[@]} = 0 ]; then
  refuse "no retriever works, so nothing can be reranked; see $WORK/rows"
fi

stage "2  Candidates"
if [ -z "$RUN" ] && [ ${#runs[@]} -gt 1 ]; then
  RUN=$T/rrf.tsv
  python 02_retrieve.py fuse $D --split $SPLIT --top-k $DEPTH --out $RUN "${runs[@]}"
  runs+=($RUN)
fi
RUN=${RUN:-${runs[0]}}

stage "3  Every reranker on the first $DEPTH of $RUN"
for name in ${MODELS:-}; do
  as=${name//[\/:]/_}
  rows="$rows $as"
  if try $as python 03_rerank.py $D --split $SPLIT --run $RUN --model $name --depth $DEPTH \
    ${FLAGS:-} --out $T/$as.tsv; then
    runs+=($T/$as.tsv)
  fi
done

stage "6  The table"
python 06_evaluate.py $D --split $SPLIT "${runs[@]}" --measures ${MEASURES:-R@2 R@5 R@10 nDCG@10} \
  --out $WORK/metrics.tsv > /dev/null
python recipes/tools/compare.py table $WORK $rows
