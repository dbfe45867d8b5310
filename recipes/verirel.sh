#!/usr/bin/env bash
# Deng, Wang and Stevenson, "+VeriRel: Verification Feedback to Enhance Document Retrieval for
# Scientific Fact Checking" (CIKM 2025). For one A100. It learns from SciFact. Tests: SciFact-Open's
# 279 claims over 500,000 abstracts (209 pairs of evidence known from SciFact, 251 new ones), and
# Check-COVID's 1,504 claims; with DATA=FOLDER, the test split of that folder.
# Rehearsal within minutes: DATA=data/demo SMALL=1 bash recipes/verirel.sh tables
. "$(dirname "$0")/common.sh" scifact
MONO_T5=$(model castorini/monot5-3b-msmarco-10k $CROSS)
MONO_T5_MED=$(model castorini/monot5-3b-med-msmarco $CROSS)
VERIFIER=$(model MoritzLaurer/DeBERTa-v3-large-mnli-fever-anli-ling-wanli $CROSS)  # for MultiVerS
SCIBERT=$(model allenai/scibert_scivocab_uncased $CROSS)
SETS=("$DATA test test SciFact")  # folder, split, judgements, table of the paper
if [ "$DATA" = data/scifact ]; then
  SETS=("data/scifact-open test citation SciFact" "data/scifact-open test pooling SciFact-Open"
        "data/check-covid all all Check-COVID")
  for x in scifact scifact-open check-covid; do [ -d data/$x ] || python data/download.py $x; done
fi
# each STEP: take a step on every evaluation set; E: its flags, R: the folder of its runs
each() {
  for set in "${SETS[@]}"; do
    read -r folder split judged table <<< "$set"
    E="--data $folder --work $WORK/${folder##*/} --split $split" R=$WORK/${folder##*/}/$split
    "$@"
  done
}
index() { python 01_index.py $E --indexes bm25; }
retrieve() { python 02_retrieve.py $E --retrievers bm25 --top-k ${DEPTH:-2000}; }
stage "1, 2  BM25: the best 100 for training, 2,000 for evaluation"
python 01_index.py $D --indexes bm25
python 02_retrieve.py $D --split train --retrievers bm25
[ ! -e $DATA/claims.dev.tsv ] || python 02_retrieve.py $D --split dev --retrievers bm25
each index; each retrieve
# judge NAME RUN DEPTH CLASSIFIER, rerank NAME MODEL FLAGS: verdicts, scores
judge() {
  python 05_classify.py $E --run $R/$2.tsv --top-k $3 --model $WORK/models/$4 --out $R/$1.tsv \
    $(small --max-length 64)
}
rerank() {
  python 03_rerank.py $E --run $R/bm25.tsv --depth ${DEPTH:-2000} --model $2 --out $R/$1.tsv \
    "${@:3}" $(small --depth 10 --max-length 256)
}
classifier() { # NAME FLAGS: train a verifier on the judged pairs
  python 05_classify.py train $D --model $VERIFIER --loss cross-entropy --sampler shuffle \
    --epochs 5 --lr 1e-5 --schedule linear --batch-size 16 --out $WORK/models/$1 "${@:2}" \
    $(small --epochs 1 --max-length 64 --lr 1e-4)
}
# feedback N: a verifier with N random negatives of BM25's best 100 per positive
feedback() {
  python 02_retrieve.py mine $D $WORK/train/bm25.tsv --shape labels --hard $1 --from-top 100 \
    --pool unjudged --out $WORK/train/verifier-$1.jsonl $(small --hard 2)
  classifier verifier-$1 --examples $WORK/train/verifier-$1.jsonl
}
# student NAME N ALPHA: SciBERT learns ComboScorer's score (eq. 4, 5) of the best 20, 1 for gold
student() {
  E="$D --split train" R=$WORK/train
  judge feedback-$2 bm25 100 verifier-$2
  rerank monot5 $MONO_T5
  rerank $1 $R/monot5.tsv --verdicts $R/feedback-$2.tsv --alpha $3
  python 02_retrieve.py mine $D $R/$1.tsv --targets score --middle 0.5 --scale 1 --from-top 20 \
    --gold --keep-claims-without-evidence --out $R/$1.jsonl
  python 03_rerank.py train $D $R/$1.jsonl --model $SCIBERT --loss l1 --lr 1e-5 --batch-size 64 \
    --epochs 40 --patience 3 --dev-run $WORK/dev/bm25.tsv --dev-depth 100 --out $WORK/models/$1 \
    $(small --epochs 1 --max-length 64 --batch-size 16)
  each rerank $1 $WORK/models/$1
}
evaluate() { # OUT RUNS
  python 06_evaluate.py $E $(printf "$R/%s.tsv " "${@:2}") --qrels $folder/qrels.$judged.tsv \
    --measures verirel --published verirel:$table --out $R/$1.$table.tsv
}
stage "5, 3  Feedback of the verifier with 5 negatives; half of the score is monoT5's"
feedback 5; student verirel 5 0.5
stage "5, 6  Verdicts of another verifier on the best 3, 5 and 10; the tables"
classifier classifier
for k in 3 5 10; do each judge verdicts-$k verirel $k classifier; done
each evaluate metrics bm25 verirel verdicts-{3,5,10}
further "${1:-}" $folder/qrels.$judged.tsv

stage "tables  monoT5 as it is, and after medical passages; a student of monoT5 alone"
each rerank monot5 $MONO_T5
each rerank monot5-med $MONO_T5_MED
student student-monot5 5 0
stage "tables  10 and 20 negatives; ComboScorer itself"
combo() { # N
  judge feedback-$1 bm25 ${DEPTH:-2000} verifier-$1
  rerank combo-$1 $R/monot5.tsv --verdicts $R/feedback-$1.tsv --alpha 0.5
}
each combo 5
ROWS="bm25 bm25-nltk monot5 monot5-med student-monot5 combo-5 verirel"
for n in $(few 10 20); do
  feedback $n
  student verirel-$n $n 0.5
  each combo $n
  ROWS="$ROWS combo-$n verirel-$n"
done
stage "tables  BM25 over NLTK's words without stems, as in the authors' code"
nltk() {
  python 01_index.py $E --indexes bm25 --analyser nltk --out $R/nltk
  python 02_retrieve.py $E --retrievers bm25 --index $R/nltk --out $R/nltk-runs
  cp $R/nltk-runs/bm25.tsv $R/bm25-nltk.tsv
}
each nltk
each evaluate tables $ROWS
stage "tables  Verdicts on the best 3, 5 and 10 of others"
ROWS=$(printf "verdicts-%s " 3 5 10)
for run in monot5 monot5-med combo-5; do
  for k in $(few 3 5 10); do
    each judge $run-verdicts-$k $run $k classifier
    ROWS="$ROWS $run-verdicts-$k"
  done
done
each evaluate verdicts $ROWS
