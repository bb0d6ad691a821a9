#!/bin/sh
# Runs a command for each message with the key jobs/NAME, the payload as its last argument:
#   SBUS_SOCKET=/run/sbus.sock worker.sh NAME COMMAND [ARGUMENT...]
# What the command prints is published with the key jobs/NAME/done or jobs/NAME/failed.
name=$1
shift

sbus sub --verbose --format='%P' "jobs/$name" | while IFS= read -r argument; do
    if result=$("$@" "$argument" 2>&1 </dev/null); then
        state=done
    else
        state=failed
    fi
    printf '%s' "$result" | sbus pub "jobs/$name/$state" -
done
