#!/usr/bin/env bash
# SourceSniffers at CheckThat! 2025 (CLEF;
# https://github.com/AIR25-CheckThat-Group1/CheckThat-ScientificClaimSourceRetrieval): first in
# subtask 4b, the paper that a post speaks of.
# For one A100. The collection comes as a pickle, which is read on your word alone:
#   python data/download.py checkthat4b --allow-pickle
# Rehearsal within minutes: DATA=data/demo SMALL=1 bash recipes/systems/sourcesniffers.sh tables
. "$(dirname "$0")/common.sh" checkthat4b

GTE=$(model Alibaba-NLP/gte-reranker-modernbert-base $CROSS)
BGE_SMALL=$(model BAAI/bge-small-en-v1.5 $MINILM)
if [ ! -d "$DATA" ]; then
  python data/download.py checkthat4b --out $DATA
fi
check "${1:-}"
TEXTS=title,abstract,authors,journal

stage "1, 2  BM25 without stems finds 1,000, also by authors, journal and date (difference 39)"
kit 01_index.py $D --indexes bm25 --analyser unstemmed --fields $TEXTS,publish_time
kit 02_retrieve.py $D --retrievers bm25 --top-k 1000

stage "2  Five negatives a post, which bge-small finds from rank 4 to 100 (difference 40)"
# search NAME ENCODER: the run NAME of train
search() {
  local name=$1 encoder=$2
  kit 01_index.py $D --indexes dense --dense-model $encoder --fields $TEXTS \
    --out $WORK/index-$name
  kit 02_retrieve.py $D --split train --index $WORK/index-$name --retrievers dense \
    --top-k 100 --out $WORK/train/$name
}
# strict NAME MARGIN OUT, loose NAME: negatives of the run NAME, the best first
strict() {
  kit recipes/train/mine.py $D $WORK/train/$1/dense.tsv --shape tuples --hard 5 --draw best \
    --skip-top 3 --from-top 97 --max-score 0.95 --margin $2 --out $WORK/train/$3.jsonl
}
loose() {
  kit recipes/train/mine.py $D $WORK/train/$1/dense.tsv --shape tuples --hard 5 --draw best \
    --skip-top 5 --from-top 95 --max-score 0.8 --margin 0.05 --out $WORK/train/$1-loose.jsonl
}
search bge $BGE_SMALL
strict bge 0 submitted

stage "3  gte-reranker learns lists of one paper and its negatives (differences 41, 42)"
# tune NAME MODEL EXAMPLES BATCH FLAGS: fine-tune a reranker. Flags name the loss, rate and epochs.
tune() {
  local name=$1 model=$2 examples=$3 batch=$4
  shift 4
  kit recipes/train/reranker.py $D $WORK/train/$examples.jsonl --model $model --fields $TEXTS \
    --batch-size $batch --max-length 512 --dev-split none \
    --out $WORK/models/$name "$@"
}
tune rerank $GTE submitted 1 --loss lambda --cutoff 5 --lr 2e-6 --epochs 1 --warmup 0.05 \
  --weight-decay 1e-7

stage "3  It orders the 1,000 of BM25"
# rerank SPLIT NAME DEPTH FLAGS: reorder as many of BM25's. Flags name the model.
rerank() {
  local split=$1 name=$2 depth=$3
  shift 3
  kit 03_rerank.py $D --split $split --run $WORK/$split/bm25.tsv --depth $depth \
    --fields title,abstract,journal,authors --max-length 512 --out $WORK/$split/$name.tsv "$@"
}
rerank test rerank ${DEPTH:-1000} --model $WORK/models/rerank

stage "6  The table and the submission"
table metrics checkthat $T/{bm25,rerank}.tsv
kit 06_evaluate.py submission $D $T/rerank.tsv --task checkthat4b
further "${1:-}"

dev_or_test

stage "tables  The submitted reranker at depths 30, 100 and 1,000"
kit 02_retrieve.py $D --split $SPLIT --retrievers bm25 --top-k 1000
rerank $SPLIT rerank ${DEPTH:-1000} --model $WORK/models/rerank
rerank $SPLIT rerank-100 100 --model $WORK/models/rerank
rerank $SPLIT rerank-30 30 --model $WORK/models/rerank
ROWS="bm25 rerank rerank-100 rerank-30"

stage "tables  Rerankers as they are on the best 30 (difference 43)"
rerank $SPLIT mxbai 30 --top-k 10 --model $(model mixedbread-ai/mxbai-rerank-base-v2 $CAUSAL)
ROWS="$ROWS mxbai"
if [ -n "${RERANK_BASE_URL:-}" ]; then
  rerank $SPLIT multilingual 30 --base-url $RERANK_BASE_URL \
    --model Alibaba-NLP/gte-multilingual-reranker-base
  ROWS="$ROWS multilingual"
else
  echo "the multilingual gte is left out, as RERANK_BASE_URL is not set"
fi

stage "tables  Five rerankers, trained by two losses on three kinds of negatives (difference 41)"
search static $(model sentence-transformers/static-retrieval-mrl-en-v1 $MINILM)
strict bge 0.05 bge-strict
loose bge
loose static

# trained NAME MODEL BCE_BATCH LAMBDA_BATCH: its rows, without and with fine-tuning
trained() {
  local name=$1 model=$2 batch=$3 lists=$4 way
  local both="--lr 2e-5 --epochs 2 --warmup 0.1 --weight-decay 0"
  local bce="--loss bce --positive-weight 5 $both"
  rerank $SPLIT $name 30 --model $model
  tune $name-bce-loose $model bge-loose $batch $bce
  tune $name-bce-strict $model bge-strict $batch $bce
  tune $name-bce-static $model static-loose $batch $bce
  tune $name-lambda $model bge-loose $lists --loss lambda --cutoff 5 $both
  for way in bce-loose bce-strict bce-static lambda; do
    rerank $SPLIT $name-$way 30 --model $WORK/models/$name-$way
  done
  ROWS="$ROWS $name $name-bce-loose $name-bce-strict $name-bce-static $name-lambda"
}
trained gte $GTE 1 1
# NAME/BCE_BATCH/LAMBDA_BATCH
OTHERS="electra-base/2/1 MiniLM-L12-v2/4/4 MiniLM-L6-v2/8/8 TinyBERT-L2-v2/128/128"
for reranker in $(few $OTHERS); do
  IFS=/ read -r name batch lists <<< "$reranker"
  trained $name $(model cross-encoder/ms-marco-$name $CROSS) $batch $lists
done

stage "tables  All runs on $SPLIT"
FILES=
for name in $ROWS; do
  FILES="$FILES $S/$name.tsv"
done
kit 06_evaluate.py $D --split $SPLIT $FILES --measures checkthat --out $S/tables.tsv
python recipes/tools/published.py $S/tables.json "$SYSTEM:CheckThat! 4b, dev"
remarks
