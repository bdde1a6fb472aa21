#!/bin/sh
# Is the node well? For cron, or a monitor that runs commands: one line, and 0 (well), 1 (look at it) or 2 (act).
#
#   check.sh [--url http://HOST:PORT]      a key is taken from KVASIR_API__KEY
#
# KVASIR_NODE names the program if it is not on the PATH.
node=${KVASIR_NODE:-kvasir-node}

told=$("$node" status --check "$@" 2>&1)
code=$?
line=$(printf '%s\n' "$told" | grep -v '^warning:' | head -n 1)
case $code in
  0) ;;
  3) echo "CRITICAL: nobody answers: $line"; exit 2 ;;
  4) echo "CRITICAL: unhealthy: $line"; exit 2 ;;
  *) echo "CRITICAL: status ended with $code: $line"; exit 2 ;;
esac
if "$node" status --check --strict "$@" >/dev/null 2>&1; then
  echo "OK: $line"
else
  echo "WARNING: $(printf '%s\n' "$told" | grep '^warning:' | head -n 1)"
  exit 1
fi
