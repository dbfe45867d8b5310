#!/usr/bin/env bash
# Judge what several systems found, as the organisers of ClimateCheck do from week to week (Abu
# Ahmad et al., SDP 2025, section 5 and appendix B): pool the first ranks of all runs, label what is
# not judged yet, merge, and see how recall and the share of judged abstracts change.
#   bash recipes/pooling.sh work/demo/test/{bm25,dense,rerank}.tsv
#   AGREEMENT=N     pairs that at least N runs have (default: 1)
#   DEPTH=N         ranks of each run (default: 10)
#   QRELS=FILE      the judgements so far, such as qrels.tsv of the week before (default:
#                   DATA/qrels.test.tsv)
# Theirs: week 1, pairs that both of two systems have (AGREEMENT=2); week 2, those that two of three
# have among ranks 1 to 8 (AGREEMENT=2 DEPTH=8); week 3, three of seven (AGREEMENT=3). The runs of a
# week are the best ones of each team.
# The first call writes pool.tsv and ends with status 3. Fill its column label, keep the file as
# labelled.tsv beside it, and call again; another week, give another folder by WORK, and the
# judgements of the last one by QRELS.
GIVEN=${QRELS:-}
. "$(dirname "$0")/systems/common.sh" demo
QRELS=${GIVEN:-$QRELS}
if [ $# = 0 ]; then
  refuse "no runs; name the runs of all systems"
fi
P=$WORK

if [ ! -e $P/labelled.tsv ]; then
  stage "The pool: unjudged pairs among the first ranks, with their best rank and number of runs"
  python recipes/tools/pool.py pool $D "$@" --pool-depth ${DEPTH:-10} \
    --agreement ${AGREEMENT:-1} --qrels "$QRELS" --out $P/pool.tsv
  echo "label $P/pool.tsv, keep it as $P/labelled.tsv, and call this again"
  exit 3
fi

stage "The judgements with the new labels"
python recipes/tools/pool.py merge $D $P/labelled.tsv --qrels "$QRELS" --out $P/qrels.tsv

stage "Recall, B-Pref and Judged@10 before and after"
python 06_evaluate.py $D "$@" --out $P/before.tsv --qrels "$QRELS"
python 06_evaluate.py $D "$@" --out $P/after.tsv --qrels $P/qrels.tsv
