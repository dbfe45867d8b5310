#!/usr/bin/env bash
# Judge what several systems found, as the organisers of ClimateCheck do from week to week (Abu
# Ahmad et al., SDP 2025): pool the first ten ranks of all runs, label what is not judged yet,
# merge, and see how recall and the share of judged abstracts change.
#   bash recipes/pooling.sh work/demo/test/{bm25,dense,rerank}.tsv
# The first call writes pool.tsv and ends with status 3. Fill its column label, keep the file as
# labelled.tsv beside it, and call again.
. "$(dirname "$0")/common.sh" demo
[ $# -gt 0 ] || refuse "no runs; name the runs of all systems"
P=$WORK

stage "1  The pool: every unjudged pair in the first ten ranks, with its best rank"
python 06_evaluate.py pool $D "$@" --pool-depth 10 --out $P/pool.tsv
if [ ! -e $P/labelled.tsv ]; then
  echo "label $P/pool.tsv, keep it as $P/labelled.tsv, and call this again"
  exit 3
fi

stage "2  The judgements with the new labels"
python 06_evaluate.py merge $D $P/labelled.tsv --out $P/qrels.tsv

stage "3  Recall, B-Pref and Judged@10 before and after"
python 06_evaluate.py $D "$@" --out $P/before.tsv
python 06_evaluate.py $D "$@" --out $P/after.tsv --qrels $P/qrels.tsv
