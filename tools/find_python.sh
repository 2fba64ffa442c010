#!/bin/sh
# Print the Python that make uses: the one given as first argument, otherwise the first fitting one on this machine.
# Where none fits: one line on standard error and status 1.

fits() { # interpreter, modules it must have
    "$1" -c "import $2, sys; sys.exit(sys.version_info < (3, 11))" >/dev/null 2>&1
}

describe() {
    version=$("$1" --version 2>&1) && echo "$1 ($version)" || echo "$1 (does not start)"
}

if [ -n "$1" ]; then
    if fits "$1" sys; then
        echo "$1"
        exit 0
    fi
    echo "make: PYTHON must be Python 3.11 or newer, got $(describe "$1")." >&2
    exit 1
fi

for python in python3 python3.13 python3.12 python3.11 python; do
    if fits "$python" "venv, ensurepip"; then
        echo "$python"
        exit 0
    fi
done
echo "make: Python 3.11 or newer with its venv module must be installed (Debian and Ubuntu keep that in a package" \
    "of its own, such as python3.12-venv), got $(describe python3)." >&2
exit 1
