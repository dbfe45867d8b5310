#!/usr/bin/env bash
# What LoRA, other fields, a choice of negatives, several seeds, averaged weights and losses change:
# one cross-encoder is trained in each way, on one small data set, with the packaged models alone.
# And what fitted weights and a learnt fusion give (results: MEASURED.md).
#   bash recipes/variants.sh scifact       or check-covid, climate-fever, or a folder of that form
# A folder has claims and qrels of train and test. There is no dev split: no epoch is chosen.
# Half an hour to an hour on 2 CPU cores; a call resumes what the last one left.
#
#   FROM=PATH       a local copy of the published files, where there is no network
#   WORK=FOLDER     folder for everything that is made (default: work/DATA/variants)
# The other settings of systems/common.sh change nothing here. LoRA needs peft (pip install peft).
NAME=${1:-}
case $NAME in
  "")
    echo "error: no data set; give scifact, check-covid, climate-fever or a folder" >&2
    exit 2 ;;
  scifact) DATA= set=scifact-split ;;
  check-covid | climate-fever) DATA= set=$NAME ;;
  *) DATA=$NAME ;;
esac
. "$(dirname "$0")/systems/common.sh" "${set:-}"
if ! python -c "import peft" 2> /dev/null; then
  refuse "LoRA needs peft: pip install peft"
fi
fetch $NAME
python data/download.py models

TRAIN=train
TEST=test
PAIR=64  # tokens of a pair
DEPTH=15  # candidates that are reranked
case $NAME in
  scifact)  # a cited abstract is relevant: BEIR
    TRAIN=train-cited
    TEST=test-cited ;;
  check-covid) PAIR=96 ;;
  climate-fever) TEST=dev ;;  # 153 claims in place of 615; nothing is chosen on them
esac

# mine NAME FLAGS: training examples
mine() {
  local name=$1
  shift
  python recipes/train/mine.py $D --split $TRAIN --out $WORK/train/$name.jsonl "$@"
}

# train NAME EXAMPLES FLAGS: a cross-encoder that begins with the weights of the first one
train() {
  local name=$1 examples=$2
  shift 2
  python recipes/train/reranker.py $D --split $TRAIN $WORK/train/$examples.jsonl --dev-split none \
    --max-length $PAIR --epochs 1 --model $WORK/models/cosines \
    --out $WORK/models/$name "$@"
}

# rerank NAME FLAGS: the candidates of test, by the model of this name
rerank() {
  local name=$1
  shift
  python 03_rerank.py $D --split $TEST --run $WORK/$TEST/z.tsv --depth $DEPTH --max-length $PAIR \
    --model $WORK/models/$name --out $WORK/$TEST/$name.tsv "$@"
}

stage "1, 2  BM25, MiniLM, SPLADE; a fusion of the first two, whose candidates are reranked"
python 01_index.py $D --max-length 256
for split in $TRAIN $TEST; do
  python 02_retrieve.py $D --split $split
  python 02_retrieve.py fuse $D --split $split --method zscore --weights 0.4 0.6 \
    --out $WORK/$split/z.tsv $WORK/$split/bm25.tsv $WORK/$split/dense.tsv
done

stage "3  A cross-encoder that imitates MiniLM's cosines, with which all others begin"
python recipes/train/mine.py $D --split $TRAIN $WORK/$TRAIN/dense.tsv --shape scores \
  --middle 0.53 --scale 1.6 --from-top 3 --out $WORK/train/cosines.jsonl
train cosines cosines --model $MINILM --lr 1e-4

stage "3  The baseline, with three seeds; their fusion, and the mean of their weights"
mine baseline $WORK/$TRAIN/dense.tsv --hard 1
for seed in 13 14 15; do
  train seed-$seed baseline --seed $seed
  rerank seed-$seed
done
python 02_retrieve.py fuse $D --split $TEST --out $WORK/$TEST/fused-seeds.tsv \
  $WORK/$TEST/seed-{13,14,15}.tsv
python recipes/tools/average.py $WORK/models/averaged $WORK/models/seed-{13,14,15}
rerank averaged

stage "3  LoRA; abstracts without titles; negatives that are chosen by rank or score"
train lora baseline --lora 16 --lr 2e-4
rerank lora
train abstracts baseline --fields abstract
rerank abstracts --fields abstract
mine skip-top $WORK/$TRAIN/dense.tsv --hard 1 --skip-top 4
mine relative-margin $WORK/$TRAIN/dense.tsv --hard 1 --relative-margin 0.95
for rule in skip-top relative-margin; do
  train $rule $rule
  rerank $rule
done

stage "3  Losses, of a network that learns fast: BERT-tiny, which imitates the cosines first"
train tiny cosines --model $SPLADE_TINY --lr 5e-4 --epochs 3
mine tuples $WORK/$TRAIN/z.tsv --shape tuples --hard 5 --from-top 50
# loss NAME FLAGS
loss() {
  local name=$1
  shift
  train $name tuples --model $WORK/models/tiny --lr 1e-4 "$@"
}
loss bce
loss bce-weighted --positive-weight balanced
loss margin --loss margin
loss lambda --loss lambda --cutoff 10 --batch-size 3  # lists of six pairs
loss softmax --loss softmax --batch-size 3
for loss in bce bce-weighted margin lambda softmax; do
  rerank $loss
done

stage "2  Weights fitted on train; fusions learnt on train"
# runs SPLIT: the three runs of a split
runs() {
  echo $WORK/$1/bm25.tsv $WORK/$1/dense.tsv $WORK/$1/splade.tsv
}
python recipes/train/fit_fusion.py $D --split $TRAIN --out $WORK/fusion.json $(runs $TRAIN)
python 02_retrieve.py fuse $D --split $TEST --fusion $WORK/fusion.json \
  --out $WORK/$TEST/fitted.tsv $(runs $TEST)
for model in forest boosting; do
  python recipes/tools/learn_fusion.py $(runs $TRAIN) --qrels $DATA/qrels.$TRAIN.tsv \
    --model $model --test $(runs $TEST) --out $WORK/$TEST/$model.tsv
done

stage "6  Tables: everything beside the baseline; the seeds beside the run that they rerank"
python 06_evaluate.py $D --split $TEST --resamples 10000 --measures R@10 nDCG@10 MRR@5 \
  --out $WORK/$TEST/variants.tsv $WORK/$TEST/seed-13.tsv $WORK/$TEST/z.tsv \
  $WORK/$TEST/{lora,abstracts,skip-top,relative-margin,fused-seeds,averaged}.tsv
python 06_evaluate.py $D --split $TEST --measures R@10 nDCG@10 --out $WORK/$TEST/seeds.tsv \
  $WORK/$TEST/z.tsv $WORK/$TEST/seed-{13,14,15}.tsv
python 06_evaluate.py $D --split $TEST --resamples 10000 --measures R@10 nDCG@10 \
  --out $WORK/$TEST/losses.tsv $WORK/$TEST/{bce,bce-weighted,margin,lambda,softmax,z}.tsv
python 06_evaluate.py $D --split $TEST --resamples 10000 --measures R@10 nDCG@10 \
  --out $WORK/$TEST/fusions.tsv $WORK/$TEST/{fitted,forest,boosting,hybrid}.tsv
python 06_evaluate.py $D --split $TRAIN --measures R@10 nDCG@10 \
  --out $WORK/$TRAIN/folds.tsv $WORK/$TEST/{forest,boosting}.folds.tsv
python recipes/tools/seeds.py $WORK/$TEST/seeds.json seed-13 seed-14 seed-15
