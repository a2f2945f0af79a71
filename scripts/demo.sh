#!/bin/sh
# What `make demo` runs, with a heading before each command. Files go to demo/, which is made anew. Needs `gnomon` on
# the PATH, with torch. Takes two to three minutes on two cores, most of it measuring and training.
set -eu
cd "$(dirname "$0")/.."
rm -rf demo
mkdir demo
GNOMON_HOME=$PWD/demo
export GNOMON_HOME

step() {
    printf '\n\n== %s\n\n' "$1"
    shift
    printf '$ gnomon'
    for word in "$@"; do printf ' %s' "$word"; done
    printf '\n\n'
    # 1 is a prediction that does not fit: worth seeing, and not an error of the demo.
    gnomon "$@" || [ $? -eq 1 ]
}

printf 'Each command below can be repeated by hand, after: export GNOMON_HOME=%s\n' "$GNOMON_HOME"

step 'Predict: how would Llama-3.1-8B train on 4 nodes of 8 H100?' \
    predict llama-3.1-8b --on 4x8xh100-sxm --stack torchtitan --zero 3 --recompute selective \
    --global-batch 128 --seq-len 8192

step 'Measure this machine' \
    calibrate

step 'Predict a small Llama on two processes of it' \
    predict --plan examples/llama-tiny.toml --timeline demo/predicted.timeline

step 'Train it for real, on the source of the Python standard library' \
    run examples/llama-tiny.toml --steps 60 --checkpoints demo/checkpoints --timeline demo/measured.timeline

step 'Compare: where does the prediction differ from what happened?' \
    compare demo/predicted.timeline demo/measured.timeline

step 'Write it as a page, and as a trace for ui.perfetto.dev' \
    report demo/predicted.timeline demo/measured.timeline --plan examples/llama-tiny.toml -o demo/report.html \
    --trace demo/trace.json

printf '\n\nOpen demo/report.html in a browser.\n'
