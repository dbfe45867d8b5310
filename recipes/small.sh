#!/usr/bin/env bash
# What every stage adds on one small data set, with the packaged models alone (see MEASURED.md).
#   bash recipes/small.sh scifact          or check-covid, climate-fever, or a folder of yours
# A folder (data/README.md) has claims and qrels of test, and of train and dev. Those two make all
# choices: weights of fusions, the best epoch of a training. Without dev, 0.15 of the train claims
# become dev; without train, nothing is fitted or trained. Test is scored at the end.
# It takes an hour (scifact) or two on 2 quiet CPU cores; call it again to resume.
#
#   FROM=PATH       a local copy of the published files, where there is no network
#   WORK=FOLDER     folder for everything that is made (default: work/DATA/small)
#   BM25_LANGUAGE=NAME  language of its stopwords and stems, as 01_index.py --language
# The other settings of systems/common.sh change nothing here.
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
fetch $NAME
python data/download.py models

# FORM is a suffix of the splits' names.
# LENGTH is the number of tokens that the encoder reads of a text.
# PAIR is the number of tokens that cross-encoders and classifiers read of a pair.
# DEPTH is the number of candidates per claim that are reranked.
# TUPLES are the flags that mine examples for the encoder.
# ENCODER_FLAGS are those of its training.
# COSINES is the number of candidates per claim whose cosines the cross-encoder first imitates.
# EPOCHS is the number of epochs of the classifier that begins with the cross-encoder's weights.
FORM=
LENGTH=256
PAIR=128
DEPTH=10
TUPLES="--hard 1"
ENCODER_FLAGS="--lr 2e-5 --batch-size 32"
COSINES=5
EPOCHS=5
if [ "$NAME" = scifact ]; then
  FORM=-cited  # every cited abstract is relevant, as in BEIR
elif [ "$NAME" = climate-fever ]; then  # short sentences, so more of them are imitated, reranked
  LENGTH=80
  PAIR=96
  DEPTH=30
  TUPLES="--hard 0"
  ENCODER_FLAGS=
  COSINES=16
  EPOCHS=3
fi
TRAIN=train$FORM
DEV=dev$FORM
TEST=test$FORM
W=$WORK
if [ ! -e $DATA/qrels.test.tsv ]; then
  refuse "$DATA: no qrels.test.tsv, so no table; README.md, \"Your own data\", works without"
fi
SPLITS="$TRAIN $DEV $TEST"
if [ ! -e $DATA/qrels.train.tsv ]; then
  SPLITS=$TEST
elif [ ! -e $DATA/qrels.dev.tsv ]; then
  # A checksum in the folder's name: corrected data are split anew.
  sum=$(cat $DATA/*.tsv $DATA/corpus.jsonl | cksum | cut -d " " -f 1)
  python data/download.py split $DATA --out $W/data-$sum
  DATA=$W/data-$sum
  D="--data $DATA --work $W"
fi

# fuse FLAGS RUNS: fuse runs
fuse() {
  python 02_retrieve.py fuse $D "$@"
}

stage "1, 2  BM25, MiniLM, SPLADE, none of them fine-tuned; their fusions"
python 01_index.py $D --language ${BM25_LANGUAGE:-english}
python 01_index.py graph $D --neighbours 10
for split in $SPLITS; do
  runs="$W/$split/bm25.tsv $W/$split/dense.tsv"
  python 02_retrieve.py $D --split $split --retrievers bm25 dense
  python 02_retrieve.py $D --split $split --retrievers splade --out $W/splade/$split
  fuse --split $split --method zscore --weights 0.4 0.6 --out $W/$split/z.tsv $runs
  runs="$runs $W/splade/$split/splade.tsv"
  fuse --split $split --out $W/$split/rrf-3.tsv $runs
  fuse --split $split --method zscore --out $W/$split/z-3.tsv $runs
done
if [ "$SPLITS" = test ]; then
  stage "6  Table: without qrels.train.tsv nothing is fitted or trained; stages 3 and 5 are left out"
  python 06_evaluate.py $D --report $W/test/report.html --out $W/test/table.tsv \
    $W/test/{bm25,dense}.tsv $W/splade/test/splade.tsv $W/test/{hybrid,z,rrf-3,z-3}.tsv \
    --measures R@2 R@5 R@10 nDCG@10
  exit
fi
# No model has seen the training claims yet, so the fusion is fitted on all of them.
python recipes/train/fit_fusion.py $D --split $TRAIN --out $W/fitted.json \
  $W/$TRAIN/{bm25,dense}.tsv $W/splade/$TRAIN/splade.tsv
fuse --split $TEST --fusion $W/fitted.json --out $W/$TEST/fitted.tsv \
  $W/$TEST/{bm25,dense}.tsv $W/splade/$TEST/splade.tsv

stage "1, 2  MiniLM fine-tuned with in-batch negatives"
python recipes/train/mine.py $D --split $TRAIN --shape tuples $TUPLES --out $W/train/tuples.jsonl
python recipes/train/encoder.py $D --split $TRAIN --dev-split $DEV $W/train/tuples.jsonl \
  --loss mnrl $ENCODER_FLAGS --max-length $LENGTH
python 01_index.py $D --indexes bm25 dense --dense-model $W/models/encoder --max-length $LENGTH \
  --language ${BM25_LANGUAGE:-english} --out $W/index-tuned
for split in $TRAIN $DEV $TEST; do
  python 02_retrieve.py $D --split $split --retrievers bm25 dense --index $W/index-tuned \
    --out $W/tuned/$split
  fuse --split $split --method zscore --weights 0.4 0.6 --out $W/$split/tuned-z.tsv \
    $W/tuned/$split/bm25.tsv $W/tuned/$split/dense.tsv
done
python recipes/train/fit_fusion.py $D --split $DEV --out $W/tuned/fitted.json \
  $W/tuned/$DEV/{bm25,dense}.tsv $W/splade/$DEV/splade.tsv
for split in $DEV $TEST; do
  fuse --split $split --fusion $W/tuned/fitted.json --out $W/$split/tuned-fitted.tsv \
    $W/tuned/$split/{bm25,dense}.tsv $W/splade/$split/splade.tsv
done

stage "3  Cross-encoder: a bi-encoder's weights first learn to compare two texts in one input"
# First they imitate the encoder's cosines (Trans-Encoder, Liu et al. 2022), then learn from labels.

# mine RUN FLAGS: make training examples of a run
mine() {
  python recipes/train/mine.py $D --split $TRAIN "$@"
}

# train EXAMPLES FLAGS: train a cross-encoder, and score it on dev before and after
train() {
  local examples=$1
  shift
  python recipes/train/reranker.py $D --split $TRAIN $examples --dev-split $DEV \
    --dev-run $W/$DEV/tuned-z.tsv --dev-depth $DEPTH --max-length $PAIR "$@"
}

python 02_retrieve.py $D --split $TRAIN --retrievers dense --index $W/index-tuned \
  --top-k $COSINES --restrict $W/tuned/$TRAIN/hybrid.tsv --out $W/tuned/cosines
# --shape scores takes claims without evidence, too. Hardly a target is clipped by this scale.
mine $W/tuned/cosines/dense.tsv --shape scores --middle 0.53 --scale 1.6 --from-top $COSINES \
  --out $W/train/cosines.jsonl
train $W/train/cosines.jsonl --model $W/models/encoder --loss bce --lr 1e-4 --epochs 1 \
  --out $W/models/cosines
mine $W/$TRAIN/tuned-z.tsv --hard 1 --easy 1 --from-top 50 --out $W/train/labels.jsonl
train $W/train/labels.jsonl --model $W/models/cosines --loss bce --lr 2e-5 --epochs 1
mine $W/$TRAIN/tuned-z.tsv --shape tuples --hard 1 --easy 1 --from-top 50 \
  --out $W/train/margin.jsonl
train $W/train/margin.jsonl --model $W/models/cosines --loss margin --batch-size 8 --lr 2e-5 \
  --epochs 1 --out $W/models/margin

stage "3  The first $DEPTH reranked, blended, with neighbours; a fusion fitted on dev"
# rerank SPLIT NAME FLAGS: rerank the first DEPTH of tuned-z.tsv
rerank() {
  local split=$1 name=$2
  shift 2
  python 03_rerank.py $D --split $split --max-length $PAIR --depth $DEPTH \
    --run $W/$split/tuned-z.tsv --out $W/$split/$name.tsv "$@"
}

for split in $DEV $TEST; do
  rerank $split cross-encoder
  rerank $split margin --model $W/models/margin
done
# Such sums of z-scores rank as --first-stage 0.5 does, and need no second pass of the model.
fuse --split $TEST --method zscore --top-k $DEPTH --out $W/$TEST/first.tsv $W/$TEST/tuned-z.tsv
fuse --split $TEST --method zscore --out $W/$TEST/blended.tsv $W/$TEST/{first,cross-encoder}.tsv
fuse --split $TEST --method zscore --out $W/$TEST/margin-blended.tsv $W/$TEST/{first,margin}.tsv
rerank $TEST graph --model $W/models/margin --graph $W/index/graph --rounds 2 --neighbours 5 \
  --beam 5
fuse --split $TEST --out $W/$TEST/ensemble.tsv $W/$TEST/{cross-encoder,margin}.tsv
python recipes/train/fit_fusion.py $D --split $DEV --out $W/all.json \
  $W/$DEV/tuned-fitted.tsv $W/$DEV/{cross-encoder,margin}.tsv
fuse --split $TEST --fusion $W/all.json --out $W/$TEST/all-fitted.tsv \
  $W/$TEST/tuned-fitted.tsv $W/$TEST/{cross-encoder,margin}.tsv

stage "6  Table of the runs"
# Runs of one table need different names.
for kind in dense hybrid; do
  cp $W/tuned/$TEST/$kind.tsv $W/$TEST/tuned-$kind.tsv
done
python 06_evaluate.py $D --split $TEST --resamples 10000 --report $W/$TEST/report.html \
  --out $W/$TEST/table.tsv $W/$TEST/{bm25,dense}.tsv $W/splade/$TEST/splade.tsv \
  $W/$TEST/{hybrid,z,rrf-3,z-3,fitted}.tsv $W/$TEST/tuned-{dense,hybrid,z,fitted}.tsv \
  $W/$TEST/{cross-encoder,blended,margin,margin-blended,ensemble,graph,all-fitted}.tsv \
  --measures R@2 R@5 R@10 nDCG@10
if [ "$NAME" = scifact ]; then
  python recipes/tools/published.py $W/$TEST/table.json scifact
fi

stage "5  Stance of the judged pairs: the qrels as a run; then of each claim"
for label in SUPPORTS REFUTES NEI; do
  if ! grep -qw $label $DATA/qrels.train.tsv; then
    echo "no $label in $DATA/qrels.train.tsv, so no classifier is trained"
    exit
  fi
done
# The splits are dev and test, whatever FORM is: -cited has no labels.
for split in dev test; do
  mkdir -p $W/$split
  tr -d '\r' < $DATA/qrels.$split.tsv | awk -F'\t' '
    NR == 1 { sub(/^[^a-z]+/, "")  # a byte-order mark
      for (i = 1; i <= NF; i++) column[$i] = i
      print "claim_id\tabstract_id\trank\tscore" }
    NR > 1 && NF { claim = $column["claim_id"]
      print claim "\t" $column["abstract_id"] "\t" ++n[claim] "\t" (1 / n[claim]) }' \
    > $W/$split/judged.tsv
done

# stance NAME FLAGS: train a classifier; dev chooses the epoch
stance() {
  local name=$1
  shift
  python recipes/train/classifier.py $D --dev-split dev --max-length $PAIR --loss cross-entropy \
    --sampler shuffle --batch-size 16 --out $W/models/stance-$name "$@"
}

# label SPLIT RUN NAME OUT FLAGS: label a run by the classifier NAME
label() {
  local split=$1 run=$2 name=$3 out=$4
  shift 4
  python 05_classify.py $D --split $split --max-length $PAIR --run $W/$run.tsv \
    --model $W/models/stance-$name --out $W/$split/$out.tsv "$@"
}

stance entropy --epochs 2
stance warm --model $W/models/cosines --epochs $EPOCHS --patience $EPOCHS --schedule linear
for adjust in 0 0.25 0.5 0.75 1; do
  label dev dev/judged warm adjust-$adjust --adjust $adjust
done
python 06_evaluate.py $D --split dev --measures F1 --depth 100000 --out $W/dev/adjust.tsv \
  $W/dev/adjust-*.tsv
# The strength with the best F1 on dev
adjust=$(awk 'NR > 1 && $2 > best { best = $2; name = $1 }
  END { sub("adjust-", "", name); print name + 0 }' $W/dev/adjust.tsv)
label test test/judged entropy stance.entropy
label test test/judged warm stance.warm
label test test/judged warm stance.adjusted --adjust $adjust
python 05_classify.py aggregate $D $W/test/stance.adjusted.tsv --out $W/test/stance.adjusted.jsonl
python recipes/tools/sentences.py $D $W/test/stance.adjusted.jsonl --model $W/models/stance-warm
label test $TEST/all-fitted warm verdicts --top-k 3 --adjust $adjust

stage "6  Tables of stance and verdicts"
python 06_evaluate.py $D --out $W/test/stance.tsv $W/test/stance.{entropy,warm,adjusted}.tsv \
  --measures P R F1 "macro F1" --depth 100000
python recipes/tools/verdicts.py $W/test/claims.jsonl $DATA/qrels.test.tsv
python 06_evaluate.py $D --out $W/test/verdicts-table.tsv $W/test/verdicts.tsv --measures verirel
