#!/usr/bin/env bash
# Run one node of a Ray cluster in a container. Start it on the head first, then on each other machine. It stays in the
# foreground, and its container is removed when it ends, for example by Ctrl-C.
set -euo pipefail

PORT=6379

usage() {
  cat >&2 <<'EOF'
usage: run_cluster.sh <image> <head ip> --head|--worker <hf home> [docker flags...]

  <head ip>    address of the head, in the network that the nodes share
  <hf home>    this machine's Hugging Face cache; the container's user (uid 1000) must be able to write to it
  docker flags for `docker run`, for example: --gpus all --privileged --device /dev/infiniband -e NCCL_IB_HCA=mlx5

Environment:
  SERVE_LLM_HOST_IP  this machine's address, if it is not the one from which the head is reached
  RAY_AUTH_TOKEN     the same on all machines: Ray refuses who does not know it. Without it everyone who reaches the
                     machines' ports can run code on them
  HF_TOKEN, SERVE_LLM_API_KEY  passed on to the container
EOF
  exit 2
}

fail() {
  echo "run_cluster.sh: $1" >&2
  exit 2
}

[ $# -ge 4 ] || usage
image=$1 head_ip=$2 role=${3#--} hf_home=$4
case $3 in --head | --worker) ;; *) usage ;; esac
shift 4
[ -d "$hf_home" ] || fail "no such directory: $hf_home"
hf_home=$(cd "$hf_home" && pwd)
command -v docker >/dev/null || fail "docker is not on PATH"

# The container's user has uid 1000 and gid 1000. Access lists are not checked, so only warn.
read -r mode uid gid < <(stat -c '%a %u %g' "$hf_home")
if [ "$uid" = 1000 ]; then wanted=0300; elif [ "$gid" = 1000 ]; then wanted=0030; else wanted=0003; fi
if (((8#$mode & wanted) != wanted)); then
  echo "run_cluster.sh: uid 1000, the container's user, cannot write to $hf_home: chown -R 1000 it, or downloads fail" >&2
fi

# Every user of the machine can read command lines with ps, so docker takes the values of secrets from the environment.
host_ip=${SERVE_LLM_HOST_IP:-} passed=()
while [ $# -gt 0 ]; do
  case $1 in
    -e | --env)
      [ $# -gt 1 ] || fail "$1 needs the name of a variable"
      shift
      variable=$1
      ;;
    -e*) variable=${1#-e} ;;
    --env=*) variable=${1#--env=} ;;
    *) variable='' && passed+=("$1") ;;
  esac
  shift
  [ -n "$variable" ] || continue
  name=${variable%%=*}
  case $name in
    *_TOKEN | *_API_KEY | *SECRET* | *PASSWORD*)
      if [ "$variable" != "$name" ]; then
        export "${variable?}"
        variable=$name
        echo "run_cluster.sh: ps shows the value of $name: export it and give '-e $name' next time" >&2
      fi
      ;;
    SERVE_LLM_HOST_IP) [ "$variable" = "$name" ] || host_ip=${variable#*=} ;;
  esac
  passed+=(-e "$variable")
done
set -- ${passed[@]+"${passed[@]}"}

# Ray, the daemon and gloo must use the same address of a node, and a machine with several networks has several.
if [ -z "$host_ip" ]; then
  if [ "$role" = head ]; then
    host_ip=$head_ip
  elif command -v ip >/dev/null; then
    host_ip=$(ip -oneline route get "$head_ip" | sed -n 's/.* src \([^ ]*\).*/\1/p') || true
  fi
  [ -n "$host_ip" ] || fail "cannot tell this machine's address towards $head_ip: set SERVE_LLM_HOST_IP"
fi
case $head_ip in *:*) address="[$head_ip]:$PORT" ;; *) address=$head_ip:$PORT ;; esac

name=serve-llm-$role-$$
run=(
  docker run --rm --init --no-healthcheck --entrypoint ray
  # NCCL and Ray share memory between processes, and RDMA pins it. --shm-size applies if --ipc host is overridden.
  --network host --ipc host --shm-size 16g --cap-add IPC_LOCK --ulimit memlock=-1:-1 --ulimit nofile=65536:65536
  --volume "$hf_home:/home/serve/.cache/huggingface"
  --env "SERVE_LLM_HOST_IP=$host_ip" --env RAY_USAGE_STATS_ENABLED=0 --env RAY_worker_niceness=0
)
for secret in HF_TOKEN SERVE_LLM_API_KEY RAY_AUTH_TOKEN; do
  [ -z "${!secret:-}" ] || run+=(--env "$secret") # docker takes the value from the environment
done
# Set it on every node, because nodes with different settings refuse each other.
if [ -n "${RAY_AUTH_TOKEN:-}" ]; then
  run+=(--env RAY_AUTH_MODE=token)
else
  run+=(--env RAY_AUTH_MODE=disabled)
  echo "run_cluster.sh: RAY_AUTH_TOKEN is not set: let nobody but the nodes reach this machine's ports" >&2
fi
start=(start "--node-ip-address=$host_ip" --disable-usage-stats --block)
if [ "$role" = head ]; then
  # Detect an unreachable node after about 5 s instead of a minute.
  run+=(
    --env RAY_health_check_initial_delay_ms=1000 --env RAY_health_check_period_ms=1000
    --env RAY_health_check_timeout_ms=1000 --env RAY_health_check_failure_threshold=3
  )
  start+=(--head "--port=$PORT")
  printf 'Head of the cluster: %s\n\nOn every other machine, with its own path and flags:\n\n  ' "$address"
  # The address of this machine is not that of the others.
  flags=("$@") worker_flags=()
  for ((at = 0; at < $#; at++)); do
    case ${flags[at]} in
      -e) case ${flags[at + 1]} in SERVE_LLM_HOST_IP*) at=$((at + 1)) && continue ;; esac ;;
    esac
    worker_flags+=("${flags[at]}")
  done
  printf '%q ' "$0" "$image" "$head_ip" --worker "$hf_home" ${worker_flags[@]+"${worker_flags[@]}"}
  printf '\n\nThen, here:\n\n  docker exec -it %s ray status\n' "$name"
  printf '  docker exec -it %s serve-llm <model> -tp <GPUs of a node> -pp <nodes> ' "$name"
  printf '%s\n\n' '--distributed-executor-backend ray'
else
  start+=("--address=$address")
fi

client=''
clean_up() {
  trap '' HUP INT TERM
  [ -z "$client" ] || kill -KILL "$client" 2>/dev/null || true
  docker rm --force "$name" >/dev/null 2>&1 || true
}
trap clean_up EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
# Run it in the background, because bash runs traps only between commands and during `wait`.
"${run[@]}" "$@" --name "$name" "$image" "${start[@]}" &
client=$!
wait "$client"
