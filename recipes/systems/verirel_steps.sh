# The steps of verirel.sh, a function each. They take the models, $DEV_FLAGS, $DEV_RUN, $SETS,
# $MAIN_SET and $GOLD from there.

# on SET: the flags of a set: train, dev, or one of the test sets. Its runs are in $WORK/SET.
on() {
  case $1 in
    open) echo $OPEN --split test ;;
    covid) echo $COVID --split all ;;
    *) echo $D --split $1 ;;
  esac
}

# verifier NAME NEGATIVES FLAGS: train a verifier with so many negatives per claim, random ones of
# BM25's best 100 (3.3). Flags are those of both commands.
verifier() {
  local name=$1 negatives=$2
  shift 2
  kit recipes/train/mine.py $(on train) $WORK/train/bm25.tsv --shape labels --hard $negatives \
    --from-top 100 --out $WORK/train/$name.jsonl "$@"
  kit recipes/train/classifier.py $(on train) $DEV_FLAGS --model $VERIFIER \
    --examples $WORK/train/$name.jsonl --loss cross-entropy --sampler shuffle --epochs 5 \
    --lr 1e-5 --schedule linear --batch-size 16 --out $WORK/models/$name "$@"
}

# judge SET RUN DEPTH MODEL NAME: label the first ranks of a run with a verifier.
judge() {
  local set=$1 run=$2 depth=$3 model=$4 name=$5
  kit 05_classify.py $(on $set) --run $WORK/$set/$run.tsv --top-k $depth \
    --model $WORK/models/$model --out $WORK/$set/$name.tsv
}

# rerank SET MODEL NAME: reorder BM25's candidates with a model.
rerank() {
  local set=$1 model=$2 name=$3
  kit 03_rerank.py $(on $set) --run $WORK/$set/bm25.tsv --depth ${DEPTH:-2000} --model $model \
    --out $WORK/$set/$name.tsv
}

# combo SET NEGATIVES ALPHA NAME: ComboScorer, the scores of monoT5 and feedback of a verifier with
# so many negatives (eq. 5).
combo() {
  local set=$1 negatives=$2 alpha=$3 name=$4
  python recipes/tools/combo_score.py $(on $set) $WORK/$set/monot5.tsv \
    $WORK/$set/feedback-$negatives.tsv --alpha $alpha --out $WORK/$set/$name.tsv
}

# student NAME NEGATIVES ALPHA: SciBERT learns ComboScorer's scores of the best 20, and 1 for
# evidence (3.4).
student() {
  local name=$1 negatives=$2 alpha=$3
  local set
  judge train bm25 100 verifier-$negatives feedback-$negatives
  rerank train $MONO_T5 monot5
  combo train $negatives $alpha teacher-$name
  kit recipes/train/mine.py $(on train) $WORK/train/teacher-$name.tsv --shape scores \
    --middle 0.5 --scale 1 --from-top 20 --gold --out $WORK/train/$name.jsonl
  kit recipes/train/reranker.py $(on train) $WORK/train/$name.jsonl --model $SCIBERT --loss l1 \
    --lr 1e-5 --schedule cosine --batch-size 64 --epochs 40 --patience 3 $DEV_RUN \
    --out $WORK/models/$name
  for set in $SETS; do
    rerank $set $WORK/models/$name $name
  done
}

# figures TABLE SET QRELS NAME RUNS: score runs of a set by a file of judgements, beside the figures
# of a published table.
figures() {
  local table=$1 set=$2 qrels=$3 name=$4
  shift 4
  if ! judged $qrels; then
    return
  fi
  local files="" run
  for run in "$@"; do
    files="$files $WORK/$set/$run.tsv"
  done
  kit 06_evaluate.py $(on $set) $files --measures verirel --qrels $qrels --out $WORK/$set/$name.tsv
  python recipes/tools/published.py $WORK/$set/$name.json "verirel:$table"
}

# table2 NAME RUNS: Table 2, runs on all test sets.
table2() {
  local name=$1
  shift
  figures SciFact $MAIN_SET $GOLD $name "$@"
  if [ $MAIN_SET = open ]; then
    figures SciFact-Open open data/scifact-open/qrels.pooling.tsv $name-pooling "$@"
    figures Check-COVID covid data/check-covid/qrels.all.tsv $name "$@"
    figures "Check-COVID, test" covid data/check-covid/qrels.test.tsv $name-test "$@"
  fi
}
