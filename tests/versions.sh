#!/bin/sh
# The tests of models and of the local engine against other versions of transformers; run by `make test-versions`.
# usage: sh tests/versions.sh PYTHON VERSION...   (5.16, ..., or "newest": the newest of everything, not pinned)
set -u
python=$1
shift
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
failed=
for version in "$@"; do
	place=.venv-versions/$version
	"$python" -m venv --clear "$place"
	own=$("$place/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
	if [ "$version" = newest ]; then
		"$place/bin/python" -m pip install -qq --upgrade --editable '.[all,dev]'
		"$place/bin/python" -m pip install -qq --upgrade transformers
	else
		# Everything else is that of the environment that is here, and found behind what is installed now.
		printf '%s\n' "$site" >"$own/behind.pth"
		"$place/bin/python" -m pip install -qq "transformers==$version.*" 2>/dev/null
	fi
	echo "[versions] transformers $("$place/bin/python" -c 'import transformers; print(transformers.__version__)')"
	OMP_NUM_THREADS=1 "$place/bin/python" -m pytest -q tests/models/test_forward.py tests/models/test_neighbors.py \
		tests/models/test_logprobs.py tests/engines/test_architectures.py || failed="$failed $version"
done
[ -z "$failed" ] || { echo "[versions] failed:$failed"; exit 1; }
