#!/usr/bin/env bash
# Deng, Wang and Stevenson, "+VeriRel: Verification Feedback to Enhance Document Retrieval for
# Scientific Fact Checking" (CIKM 2025). For one A100. Their test set is 279 test claims of SciFact,
# whose labels SciFact-Open made public: 209 pairs of evidence.
# Rehearsal within minutes: DATA=data/demo SMALL=1 bash recipes/verirel.sh tables
. "$(dirname "$0")/common.sh" scifact
MONO_T5=$(model castorini/monot5-3b-msmarco $CROSS)
VERIFIER=$(model MoritzLaurer/DeBERTa-v3-large-mnli-fever-anli-ling-wanli $CROSS)  # for MultiVerS
SCIBERT=$(model allenai/scibert_scivocab_uncased $CROSS)
QRELS=$DATA/qrels.test.tsv
[ -e "$QRELS" ] || QRELS=data/scifact-open/qrels.citation.tsv
[ -d "$DATA" ] || python data/download.py scifact --out $DATA
[ -e "$QRELS" ] || python data/download.py scifact-open

# classifier NAME FLAGS: train a verifier on the judged pairs
classifier() {
  python 05_classify.py train $D --model $VERIFIER --loss cross-entropy --sampler shuffle \
    --epochs 5 --lr 1e-5 --schedule linear --batch-size 16 --out $WORK/models/$1 "${@:2}" \
    $(small --epochs 1 --max-length 64 --lr 1e-4)
}
# feedback N: a verifier with N random negatives of BM25's best 100 per positive, on both splits
feedback() {
  python 02_retrieve.py mine $D $WORK/train/bm25.tsv --shape labels --hard $1 --from-top 100 \
    --pool unjudged --out $WORK/train/verifier-$1.jsonl $(small --hard 2)
  classifier verifier-$1 --examples $WORK/train/verifier-$1.jsonl
  for split in train test; do
    python 05_classify.py $D --split $split --run $WORK/$split/bm25.tsv --top-k 100 \
      --model $WORK/models/verifier-$1 --out $WORK/$split/feedback-$1.tsv \
      $(small --top-k 10 --max-length 64)
  done
}
# student N ALPHA NAME: ComboScorer (eq. 4, 5), then SciBERT learns its score for the best 20, and 1
# for gold evidence (L1)
student() {
  for split in train test; do
    python 03_rerank.py $D --split $split --run $WORK/$split/bm25.tsv --model $MONO_T5 \
      --depth 100 --verdicts $WORK/$split/feedback-$1.tsv --alpha $2 \
      --out $WORK/$split/combo-$1-$2.tsv $(small --depth 10 --max-length 256)
  done
  python 02_retrieve.py mine $D $WORK/train/combo-$1-$2.tsv --targets score --middle 0.5 --scale 1 \
    --from-top 20 --gold --keep-claims-without-evidence --out $WORK/train/$3.jsonl
  python 03_rerank.py train $D $WORK/train/$3.jsonl --model $SCIBERT --loss l1 --lr 1e-5 \
    --batch-size 64 --epochs 10 --dev-split none --out $WORK/models/$3 \
    $(small --epochs 1 --max-length 64 --batch-size 16)
  python 03_rerank.py $D --run $T/bm25.tsv --depth 100 --model $WORK/models/$3 --out $T/$3.tsv \
    $(small --depth 20 --max-length 256)
}
evaluate() { python 06_evaluate.py $D "$@" --qrels $QRELS --measures verirel --published verirel; }

stage "1, 2  Candidates: the best 100 by BM25"
python 01_index.py $D --indexes bm25
for split in train test; do
  python 02_retrieve.py $D --split $split --retrievers bm25 --top-k 100
done
stage "5, 3  Feedback of the verifier with 5 negatives; half of the score is monoT5's"
feedback 5
student 5 0.5 verirel
stage "5, 6  Verdicts of another verifier on the best 3, 5 and 10; the table"
classifier classifier
for k in 3 5 10; do
  python 05_classify.py $D --run $T/verirel.tsv --top-k $k --out $T/verdicts-$k.tsv \
    $(small --max-length 64)
done
evaluate $T/{bm25,combo-5-0.5,verirel,verdicts-3,verdicts-5,verdicts-10}.tsv
[ "${1:-}" = tables ] || exit 0

stage "tables  monoT5 alone; a student of monoT5 alone; 10 and 20 negatives"
python 03_rerank.py $D --run $T/bm25.tsv --model $MONO_T5 --depth 100 --out $T/monot5.tsv \
  $(small --depth 10 --max-length 256)
student 5 0 student-monot5
for n in 10 20; do
  feedback $n
  student $n 0.5 verirel-$n
done
evaluate $T/{bm25,monot5,student-monot5,verirel,verirel-10,verirel-20}.tsv --out $T/tables.tsv
