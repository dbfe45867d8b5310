#!/usr/bin/env bash
# Deng, Wang and Stevenson, "+VeriRel: Verification Feedback to Enhance Document Retrieval for
# Scientific Fact Checking" (CIKM 2025; https://github.com/xingyu-deng/VeriRel). For one A100.
# Rehearsal within minutes: DATA=data/demo SMALL=1 bash recipes/verirel.sh tables
. "$(dirname "$0")/common.sh" scifact
MONO_T5=$(model castorini/monot5-3b-msmarco-10k $CROSS)
MONO_T5_MED=$(model castorini/monot5-3b-med-msmarco $CROSS)
VERIFIER=$(model MoritzLaurer/DeBERTa-v3-large-mnli-fever-anli-ling-wanli $CROSS)  # for MultiVerS
SCIBERT=$(model allenai/scibert_scivocab_uncased $CROSS)
TRAIN="$DATA train" DEV="$DATA dev"  # a set: FOLDER SPLIT
# Tables: FOLDER SPLIT JUDGEMENTS, and the name of the published figures. SciFact's own evidence
# (citation) and SciFact-Open's new one (pooling) lie in one collection (difference 26).
TABLES=("$DATA test test SciFact")
if [ "$DATA" = data/scifact ]; then
  for x in scifact scifact-open check-covid; do [ -d data/$x ] || python data/download.py $x; done
  TABLES=("data/scifact-open test citation SciFact" "data/scifact-open test pooling SciFact-Open"
    "data/check-covid all all Check-COVID" "data/check-covid all test Check-COVID, test")
fi
mapfile -t SETS < <(printf "%s\n" "${TABLES[@]}" | cut -d " " -f 1,2 | uniq)
# on FOLDER SPLIT: flags; runs FOLDER SPLIT: the folder of a set's runs
on() { echo "--data $1 --work $WORK/$(basename $1) --split $2"; }
runs() { echo "$WORK/$(basename $1)/$2"; }

stage "1, 2  BM25: the best 100 for training, 2,000 for evaluation (3.2; difference 26)"
bm25() { # FOLDER SPLIT DEPTH
  python 01_index.py --data $1 --work $WORK/$(basename $1) --indexes bm25 --analyser nltk
  python 02_retrieve.py $(on $1 $2) --retrievers bm25 --top-k $3
}
bm25 $TRAIN 100
[ ! -e $DATA/claims.dev.tsv ] || bm25 $DEV 100
for set in "${SETS[@]}"; do bm25 $set ${DEPTH:-2000}; done
judge() { # FOLDER SPLIT NAME RUN DEPTH CLASSIFIER
  python 05_classify.py $(on $1 $2) --run $(runs $1 $2)/$4.tsv --top-k $5 \
    --model $WORK/models/$6 --out $(runs $1 $2)/$3.tsv $(small --max-length 96)
}
rerank() { # FOLDER SPLIT NAME MODEL FLAGS; in place of a model, a run whose scores count
  python 03_rerank.py $(on $1 $2) --run $(runs $1 $2)/bm25.tsv --depth ${DEPTH:-2000} --model $4 \
    --out $(runs $1 $2)/$3.tsv "${@:5}" $(small --depth 10 --max-length 256)
}
verifier() { # NAME N FLAGS: N random negatives of BM25's best 100 for each positive (3.3)
  python 02_retrieve.py mine $(on $TRAIN) $(runs $TRAIN)/bm25.tsv --shape labels --hard $2 \
    --from-top 100 --pool unjudged --out $(runs $TRAIN)/$1.jsonl "${@:3}" $(small --hard 2)
  python 05_classify.py train $(on $TRAIN) --model $VERIFIER --examples $(runs $TRAIN)/$1.jsonl \
    $([ ! -e $DATA/claims.dev.tsv ] || echo --dev-split dev) --loss cross-entropy \
    --sampler shuffle --epochs 5 --lr 1e-5 --schedule linear --batch-size 16 \
    --out $WORK/models/$1 "${@:3}" $(small --epochs 1 --max-length 96 --lr 1e-4)
}
student() { # NAME N ALPHA: SciBERT learns ComboScorer's score of the best 20, 1 for gold (eq. 5)
  judge $TRAIN feedback-$2 bm25 100 verifier-$2
  rerank $TRAIN monot5 $MONO_T5
  rerank $TRAIN teacher-$1 $(runs $TRAIN)/monot5.tsv --verdicts $(runs $TRAIN)/feedback-$2.tsv \
    --alpha $3
  python 02_retrieve.py mine $(on $TRAIN) $(runs $TRAIN)/teacher-$1.tsv --shape scores \
    --middle 0.5 --scale 1 --from-top 20 --gold --out $(runs $TRAIN)/$1.jsonl
  python 03_rerank.py train $(on $TRAIN) $(runs $TRAIN)/$1.jsonl --model $SCIBERT --loss l1 \
    --lr 1e-5 --batch-size 64 --epochs 40 --patience 3 --dev-run $(runs $DEV)/bm25.tsv \
    --dev-depth 100 --out $WORK/models/$1 $(small --epochs 1 --max-length 96 --batch-size 16)
  for set in "${SETS[@]}"; do rerank $set $1 $WORK/models/$1; done
}
figures() { # TEST OUT RUNS: one table with its published figures
  local folder split judged table; read -r folder split judged table <<< "$1"
  local to=$(runs $folder $split)
  python 06_evaluate.py $(on $folder $split) $(printf "$to/%s.tsv " "${@:3}") --measures verirel \
    --qrels $folder/qrels.$judged.tsv --out $to/$2.$judged.tsv
  python recipes/tools/published.py $to/$2.$judged.json "verirel:$table"
}

stage "5, 3  +VeriRel learns from monoT5 and a verifier with 5 negatives (3.4; differences 22-25)"
verifier verifier-5 5
student verirel 5 0.5
stage "5, 6  Table 2; Table 3: verdicts of another verifier on the best 3, 5, 10 (difference 27)"
for test in "${TABLES[@]}"; do figures "$test" metrics bm25 verirel; done
verifier classifier 20 --seed 14  # other negatives than feedback's
for k in 3 5 10; do judge ${SETS[0]} verdicts-$k verirel $k classifier; done
figures "${TABLES[0]}" verdicts verdicts-{3,5,10}
further "${1:-}" $(awk '{ print $1 "/qrels." $3 ".tsv" }' <<< "${TABLES[0]}")

stage "tables  Table 2: monoT5 as it is, and after medical passages; alpha = 0"
for set in "${SETS[@]}"; do
  rerank $set monot5 $MONO_T5
  rerank $set monot5-med $MONO_T5_MED
done
student student-monot5 5 0
stage "tables  Table 2: 5, 10 and 20 negatives; ComboScorer itself"
NEGATIVES=$(few 5 10 20) STUDENTS=verirel
for n in ${NEGATIVES#5}; do  # 5 is done
  verifier verifier-$n $n
  student verirel-$n $n 0.5
  STUDENTS="$STUDENTS verirel-$n"
done
for set in "${SETS[@]}"; do
  for n in $NEGATIVES; do
    judge $set feedback-$n bm25 ${DEPTH:-2000} verifier-$n
    rerank $set combo-$n $(runs $set)/monot5.tsv --verdicts $(runs $set)/feedback-$n.tsv --alpha 0.5
  done
done
for test in "${TABLES[@]}"; do
  figures "$test" tables bm25 monot5 monot5-med student-monot5 $STUDENTS \
    $(printf "combo-%s " $NEGATIVES)
done
stage "tables  Table 1: the verifiers that give feedback, on the best 10 of monoT5"
for n in $NEGATIVES; do judge ${SETS[0]} verifier-$n monot5 10 verifier-$n; done
figures "${TABLES[0]}, Table 1" table1 $(printf "verifier-%s " $NEGATIVES)
stage "tables  Table 3: verdicts on the best 3, 5 and 10 of monoT5"
for k in 3 5 10; do judge ${SETS[0]} monot5-verdicts-$k monot5 $k classifier; done
figures "${TABLES[0]}" table3 verdicts-{3,5,10} monot5-verdicts-{3,5,10}
remarks
