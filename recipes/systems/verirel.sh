#!/usr/bin/env bash
# Deng, Wang and Stevenson, "+VeriRel: Verification Feedback to Enhance Document Retrieval for
# Scientific Fact Checking" (CIKM 2025; https://github.com/xingyu-deng/VeriRel).
# For one A100.
# Rehearsal within minutes: DATA=data/demo SMALL=1 bash recipes/systems/verirel.sh tables
. "$(dirname "$0")/common.sh" scifact
. recipes/systems/verirel_steps.sh

MONO_T5=$(model castorini/monot5-3b-msmarco-10k $CROSS)
VERIFIER=$(model MoritzLaurer/DeBERTa-v3-large-mnli-fever-anli-ling-wanli $NLI)  # for MultiVerS
SCIBERT=$(model allenai/scibert_scivocab_uncased $CROSS)
if [ -n "$SMALL" ]; then
  DEPTH=${DEPTH:-100}
fi

# Models trained on SciFact are tested on SciFact-Open's abstracts, which include SciFact's own
# evidence (citation), and on all claims of Check-COVID (difference 29). Models trained on other
# data are tested on the test split of these data. MAIN_SET is the test set of Table 1, Table 3 and
# the first part of Table 2.
OPEN="--data data/scifact-open --work $WORK/open"
COVID="--data data/check-covid --work $WORK/covid"
if [ "$DATA" = data/scifact ]; then
  SETS="open covid"
  MAIN_SET=open
  GOLD=data/scifact-open/qrels.citation.tsv
  for name in scifact scifact-open check-covid; do
    if [ ! -d data/$name ]; then
      python data/download.py $name
    fi
  done
else
  SETS=test
  MAIN_SET=test
  GOLD=$QRELS
fi
check "${1:-}" $GOLD
DEV_FLAGS=
DEV_RUN=
if [ -e $DATA/claims.dev.tsv ]; then
  DEV_FLAGS="--dev-split dev"
  DEV_RUN="--dev-run $WORK/dev/bm25.tsv --dev-depth 100"
fi

stage "1, 2  BM25: the best 100 for training, 2,000 for evaluation (3.2; difference 29)"
kit 01_index.py $D --indexes bm25 --analyser nltk
kit 02_retrieve.py $(on train) --retrievers bm25 --top-k 100
if [ -n "$DEV_FLAGS" ]; then
  kit 02_retrieve.py $(on dev) --retrievers bm25 --top-k 100
fi
if [ $MAIN_SET = open ]; then
  kit 01_index.py $OPEN --indexes bm25 --analyser nltk
  kit 01_index.py $COVID --indexes bm25 --analyser nltk
fi
for set in $SETS; do
  kit 02_retrieve.py $(on $set) --retrievers bm25 --top-k ${DEPTH:-2000} --out $WORK/$set
done

stage "5, 3  +VeriRel learns from monoT5 and a verifier with 5 negatives (3.4; differences 26-28)"
verifier verifier-5 5
student verirel 5 0.5

stage "5, 6  Table 2; Table 3: verdicts of another verifier on the best 3, 5, 10 (difference 30)"
table2 metrics bm25 verirel
verifier classifier 20 --seed 14  # other negatives than feedback's
for depth in 3 5 10; do
  judge $MAIN_SET verirel $depth classifier verdicts-$depth
done
figures SciFact $MAIN_SET $GOLD verdicts verdicts-{3,5,10}
further "${1:-}"

stage "tables  Table 2: monoT5 as it is, and after medical passages; alpha = 0"
MONO_T5_MED=$(model castorini/monot5-3b-med-msmarco $CROSS)
for set in $SETS; do
  rerank $set $MONO_T5 monot5
  rerank $set $MONO_T5_MED monot5-med
done
student student-monot5 5 0

stage "tables  Table 2: 10 and 20 negatives"
for negatives in 10 20; do
  verifier verifier-$negatives $negatives
  student verirel-$negatives $negatives 0.5
done

stage "tables  Table 2: ComboScorer itself, with feedback on all candidates"
for set in $SETS; do
  for negatives in 5 10 20; do
    judge $set bm25 ${DEPTH:-2000} verifier-$negatives feedback-$negatives
    combo $set $negatives 0.5 combo-$negatives
  done
done
table2 tables bm25 monot5 monot5-med student-monot5 verirel{,-10,-20} combo-{5,10,20}

stage "tables  Table 1: the verifiers that give feedback, on the best 10 of monoT5"
for negatives in 5 10 20; do
  judge $MAIN_SET monot5 10 verifier-$negatives verifier-$negatives
done
figures "SciFact, Table 1" $MAIN_SET $GOLD table1 verifier-{5,10,20}

stage "tables  Table 3: verdicts on the best 3, 5 and 10 of monoT5"
for depth in 3 5 10; do
  judge $MAIN_SET monot5 $depth classifier monot5-verdicts-$depth
done
figures SciFact $MAIN_SET $GOLD table3 verdicts-{3,5,10} monot5-verdicts-{3,5,10}
remarks
