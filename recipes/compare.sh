#!/usr/bin/env bash
# Retrievers and rerankers side by side on one data set, one line each: recall, nDCG@10, seconds,
# GPU memory, equal scores, significance against the first line.
# A model that fails is a line with its error. The next call makes only what is missing or changed.
#   RETRIEVERS="bm25 Qwen/Qwen3-Embedding-0.6B splade:naver/splade-v3" \
#   MODELS="BAAI/bge-reranker-v2-m3 Qwen/Qwen3-Reranker-0.6B" DATA=data/mine bash recipes/compare.sh
# Rehearsal within minutes: DATA=data/demo SMALL=1 bash recipes/compare.sh
# Without DATA: SciFact, Check-COVID and CLIMATE-FEVER, each retriever by default the packaged one.
#
#   SPLIT=NAME          whose claims (default: test)
#   RUN=FILE            candidates (default: reciprocal rank fusion of the retrievers)
#   DEPTH=N             candidates per claim (default: 100)
#   MEASURES="R@5 RR"   of 06_evaluate.py (default: R@2 R@5 R@10 nDCG@10)
#   FLAGS="FLAGS"       of 01_index.py and 03_rerank.py, as --device cuda:0 cuda:1 --max-length 1024
if [ -z "${DATA:-}" ]; then
  . "$(dirname "$0")/common.sh" demo
  python data/download.py models
  export RETRIEVERS=${RETRIEVERS:-bm25 $MINILM splade:$SPLADE_TINY}
  for set in scifact check-covid climate-fever; do fetch $set; done
  DATA=data/scifact-split SPLIT=test-cited bash recipes/compare.sh  # judged as in BEIR
  DATA=data/check-covid bash recipes/compare.sh
  DATA=data/climate-fever bash recipes/compare.sh
  exit
fi
. "$(dirname "$0")/common.sh" demo
SPLIT=${SPLIT:-test}
T=$WORK/$SPLIT
D="$D --split $SPLIT"
[ -e $DATA/qrels.$SPLIT.tsv ] ||
  refuse "DATA: no $DATA/qrels.$SPLIT.tsv, so nothing can be compared"
if [ -n "$SMALL" ]; then
  FLAGS=${FLAGS:---max-length 160} DEPTH=${DEPTH:-20}
  RETRIEVERS=${RETRIEVERS:-bm25 $MINILM splade:$SPLADE_TINY}
  MODELS=${MODELS:-$(model "a cross-encoder" $CROSS) $(model "a causal reranker" $CAUSAL)}
fi
DEPTH=${DEPTH:-100}
[ -n "${RUN:=}" ] || RETRIEVERS=${RETRIEVERS:-bm25}
runs=($RUN)

rows=""  # a model's row, which is also the name of its files
# try NAME COMMAND: run it and keep in rows/NAME.json what it took, or its error
try() {
  local status=0
  python recipes/tools/compare.py run $WORK/rows/$1.json "${@:2}" || status=$?
  [ $status != 130 ] || exit 130
  return $status
}

stage "1, 2  Every retriever: its index, and its best $DEPTH"
for name in ${RETRIEVERS:=}; do
  as=${name//[\/:]/_}
  rows="$rows $as"
  case $name in
    bm25) kind=bm25 how="" ;;
    splade:*) kind=splade how="--splade-model ${name#splade:}" ;;
    *) kind=dense how="--dense-model $name" ;;
  esac
  try $as.index python 01_index.py $D --indexes $kind $how ${FLAGS:-} --out $WORK/index/$as &&
  try $as python 02_retrieve.py $D --retrievers $kind --index $WORK/index/$as --top-k $DEPTH \
    --out $T/$as &&
  cp $T/$as/$kind.tsv $T/$as.tsv &&
  cp $T/$as/$kind.tsv.meta.json $T/$as.tsv.meta.json &&
  runs+=($T/$as.tsv)
done
[ ${#runs[@]} -gt 0 ] || refuse "no retriever works, so nothing can be reranked; see $WORK/rows"

stage "2  Candidates"
if [ -z "$RUN" ] && [ ${#runs[@]} -gt 1 ]; then
  RUN=$T/rrf.tsv
  python 02_retrieve.py fuse $D --top-k $DEPTH --out $RUN "${runs[@]}"
  runs+=($RUN)
fi
RUN=${RUN:-${runs[0]}}

stage "3  Every reranker on the first $DEPTH of $RUN"
for name in ${MODELS:=}; do
  as=${name//[\/:]/_}
  rows="$rows $as"
  try $as python 03_rerank.py $D --run $RUN --model $name --depth $DEPTH ${FLAGS:-} \
    --out $T/$as.tsv &&
  runs+=($T/$as.tsv)
done

stage "6  The table"
python 06_evaluate.py $D "${runs[@]}" --measures ${MEASURES:-R@2 R@5 R@10 nDCG@10} \
  --out $WORK/metrics.tsv > /dev/null
python recipes/tools/compare.py table $WORK $rows
