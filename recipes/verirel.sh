#!/usr/bin/env bash
# Deng, Wang and Stevenson, "+VeriRel: Verification Feedback to Enhance Document Retrieval for
# Scientific Fact Checking" (CIKM 2025; https://github.com/xingyu-deng/VeriRel). For one A100.
# Rehearsal within minutes: DATA=data/demo SMALL=1 bash recipes/verirel.sh tables
. "$(dirname "$0")/common.sh" scifact
MONO_T5=$(model castorini/monot5-3b-msmarco-10k $CROSS)
MONO_T5_MED=$(model castorini/monot5-3b-med-msmarco $CROSS)
VERIFIER=$(model MoritzLaurer/DeBERTa-v3-large-mnli-fever-anli-ling-wanli $CROSS)  # for MultiVerS
SCIBERT=$(model allenai/scibert_scivocab_uncased $CROSS)
# Training: SciFact. TESTS: "FOLDER SPLIT JUDGEMENTS TABLE; ...", with verdicts for the first
OPEN="data/scifact-open test" COVID="data/check-covid all"
if [ -z "${TESTS:=}" ] && [ "$DATA" = data/scifact ]; then
  TESTS="$OPEN citation SciFact; $OPEN pooling SciFact-Open"
  TESTS="$TESTS; $COVID all Check-COVID; $COVID test Check-COVID, test"
  for x in scifact scifact-open check-covid; do [ -d data/$x ] || python data/download.py $x; done
fi
IFS=";" read -ra TABLES <<< "${TESTS:-$DATA test test SciFact}"
mapfile -t SETS < <(printf "%s\n" "${TABLES[@]}" | awk '{ print $1, $2 }' | uniq)
# on FOLDER SPLIT STEP: take a step there; E: its flags, R: the folder of its runs
on() { E="--data $1 --work $WORK/${1##*/} --split $2" R=$WORK/${1##*/}/$2; "${@:3}"; }
each() { for set in "${SETS[@]}"; do on $set "$@"; done; }
# figures OUT TABLE RUNS: one table with its published figures; all_figures OUT RUNS: every one
figures() {
  read -r folder split judged table <<< "$2"
  on $folder $split
  python 06_evaluate.py $E $(printf "$R/%s.tsv " "${@:3}") --qrels $folder/qrels.$judged.tsv \
    --measures verirel --out $R/$1.$judged.tsv
  python recipes/tools/published.py $R/$1.$judged.json "verirel:$table"
}
all_figures() { for table in "${TABLES[@]}"; do figures $1 "$table" "${@:2}"; done; }
index() { python 01_index.py $E --indexes bm25 --analyser nltk; }
retrieve() { python 02_retrieve.py $E --retrievers bm25 --top-k ${DEPTH:-2000}; }
stage "1, 2  BM25 (3.2): the best 100 for training, 2,000 for evaluation (difference 26)"
python 01_index.py $D --indexes bm25 --analyser nltk
python 02_retrieve.py $D --split train --retrievers bm25
[ ! -e $DATA/claims.dev.tsv ] || python 02_retrieve.py $D --split dev --retrievers bm25
each index; each retrieve
# judge NAME RUN DEPTH CLASSIFIER, rerank NAME MODEL FLAGS: verdicts, scores
judge() {
  python 05_classify.py $E --run $R/$2.tsv --top-k $3 --model $WORK/models/$4 --out $R/$1.tsv \
    $(small --max-length 96)
}
rerank() {
  python 03_rerank.py $E --run $R/bm25.tsv --depth ${DEPTH:-2000} --model $2 --out $R/$1.tsv \
    "${@:3}" $(small --depth 10 --max-length 256)
}
# verifier NAME N FLAGS: it sees N random negatives of BM25's best 100 for each positive (3.3)
DEV=$([ ! -e $DATA/claims.dev.tsv ] || echo --dev-split dev)
verifier() {
  python 02_retrieve.py mine $D $WORK/train/bm25.tsv --shape labels --hard $2 --from-top 100 \
    --pool unjudged --out $WORK/train/$1.jsonl "${@:3}" $(small --hard 2)
  python 05_classify.py train $D $DEV --model $VERIFIER --examples $WORK/train/$1.jsonl \
    --loss cross-entropy --sampler shuffle --epochs 5 --lr 1e-5 --schedule linear --batch-size 16 \
    --out $WORK/models/$1 "${@:3}" $(small --epochs 1 --max-length 96 --lr 1e-4)
}
# student NAME N ALPHA: SciBERT learns ComboScorer's score (eq. 4, 5) of the best 20, 1 for gold
student() {
  E="$D --split train" R=$WORK/train
  judge feedback-$2 bm25 100 verifier-$2
  rerank monot5 $MONO_T5
  rerank $1 $R/monot5.tsv --verdicts $R/feedback-$2.tsv --alpha $3
  python 02_retrieve.py mine $D $R/$1.tsv --shape scores --middle 0.5 --scale 1 --from-top 20 \
    --gold --out $R/$1.jsonl
  python 03_rerank.py train $D $R/$1.jsonl --model $SCIBERT --loss l1 --lr 1e-5 --batch-size 64 \
    --epochs 40 --patience 3 --dev-run $WORK/dev/bm25.tsv --dev-depth 100 --out $WORK/models/$1 \
    $(small --epochs 1 --max-length 96 --batch-size 16)
  each rerank $1 $WORK/models/$1
}
stage "5, 3  Section 3.4: feedback of a verifier with 5 negatives, half is monoT5's (22-25)"
verifier verifier-5 5; student verirel 5 0.5
stage "5, 6  Table 2; Table 3: verdicts of another verifier on the best 3, 5, 10, for SciFact (27)"
all_figures metrics bm25 verirel
verifier classifier 20 --seed 14
for k in 3 5 10; do on ${SETS[0]} judge verdicts-$k verirel $k classifier; done
figures verdicts "${TABLES[0]}" verdicts-{3,5,10}
further "${1:-}" $folder/qrels.$judged.tsv

stage "tables  Table 2: monoT5 as it is, and after medical passages; alpha = 0"
each rerank monot5 $MONO_T5
each rerank monot5-med $MONO_T5_MED
student student-monot5 5 0
stage "tables  Table 2: 10 and 20 negatives; ComboScorer itself"
combo() { # N
  judge feedback-$1 bm25 ${DEPTH:-2000} verifier-$1
  rerank combo-$1 $R/monot5.tsv --verdicts $R/feedback-$1.tsv --alpha 0.5
}
each combo 5
ROWS="bm25 monot5 monot5-med combo-5 student-monot5 verirel"
for n in $(few 10 20); do
  verifier verifier-$n $n
  student verirel-$n $n 0.5
  each combo $n
  ROWS="$ROWS combo-$n verirel-$n"
done
all_figures tables $ROWS
stage "tables  Table 1: the verifiers that give feedback, on the best 10 of monoT5"
ROWS=
for n in 5 $(few 10 20); do
  on ${SETS[0]} judge verifier-$n monot5 10 verifier-$n
  ROWS="$ROWS verifier-$n"
done
figures table1 "${TABLES[0]}, Table 1" $ROWS
stage "tables  Table 3: verdicts on the best 3, 5 and 10 of monoT5, and of others"
ROWS=$(printf "verdicts-%s " 3 5 10)
for run in monot5 monot5-med combo-5; do
  for k in $(few 3 5 10); do
    on ${SETS[0]} judge $run-verdicts-$k $run $k classifier
    ROWS="$ROWS $run-verdicts-$k"
  done
done
figures table3 "${TABLES[0]}" $ROWS
remarks
