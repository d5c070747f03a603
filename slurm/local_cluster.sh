#!/usr/bin/env bash
# A real Slurm cluster on this one machine: Debian's packages, no systemd, no docker, no cgroups, all state in one directory.
#
#   slurm/local_cluster.sh install          the packages (root and apt; nothing else here needs either)
#   slurm/local_cluster.sh start            from scratch, on free ports; returns when every node is idle
#   slurm/local_cluster.sh stop             end all jobs and daemons and remove the directory, but for its logs
#   slurm/local_cluster.sh status           0 if every daemon is up and every node can be used
#   slurm/local_cluster.sh start-node NODE  slurmd again, where it was killed
#   eval "$(slurm/local_cluster.sh env)"    point sbatch, squeue, ... at it
#
# munged, MariaDB, slurmdbd, slurmctld and a slurmd for each of the nodes node1, node2, ..., which share the machine and
# differ by their ports. They have as many CPUs and as much memory as we say. One more, in the partition gpu, has two GPUs,
# which are /dev/null; the partition mixed has all nodes.
#
#   SLURM_CLUSTER_DIR=/tmp/slurm_cluster    a short path: munge's socket is in it
#   SLURM_CLUSTER_NODES=4
set -euo pipefail

DIR=${SLURM_CLUSTER_DIR:-/tmp/slurm_cluster}
NODES=${SLURM_CLUSTER_NODES:-4}
PACKAGES=(munge slurmctld slurmd slurm-client slurmdbd slurm-wlm-mysql-plugin mariadb-server-core mariadb-client-core)
PATH=$PATH:/usr/sbin:/sbin
export SLURM_CONF=$DIR/conf/slurm.conf
unset SLURM_JOB_ID SLURM_JOBID  # a cluster may be started from within another's job

say() { echo "local_cluster: $*" >&2; }
die() { say "$*"; exit 1; }
nodes() { seq -f 'node%.0f' 1 $((NODES + 1)); }

wait_for() {  # SECONDS WHAT COMMAND...
    local deadline=$((SECONDS + $1)) what=$2
    shift 2
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $deadline ] || { say "waited in vain for $what"; return 1; }
        sleep 0.1
    done
}

# --- processes: by pid file, and only if the pid is still that daemon's

pid_of() {  # NAME, as in run/NAME.pid; node1 for its slurmd
    local pid command
    pid=$(cat "$DIR/run/$1.pid" 2>/dev/null) || return 1
    case $1 in node*) command=slurmd ;; *) command=$1 ;; esac
    [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "$command" ] && ! grep -q '^State:.Z' "/proc/$pid/status" && echo "$pid"
}

is_down() { ! pid_of "$1"; }

stop_daemon() {  # NAME
    local pid
    if pid=$(pid_of "$1"); then
        kill -TERM "$pid" 2>/dev/null || true
        wait_for 15 "$1 to end" is_down "$1" || kill -KILL "$pid" 2>/dev/null || true
    fi
}

# A step's daemon outlives its slurmd by design and has no pid file: it is ours if it has a log of ours open.
step_daemons() {
    local process
    for process in /proc/[0-9]*; do
        [ "$(cat "$process/comm" 2>/dev/null)" = slurmstepd ] || continue
        readlink "$process"/fd/* 2>/dev/null | grep -q "^$DIR/log/" && echo "${process#/proc/}"
    done
    return 0
}

with_descendants() {  # PID...
    ps -e -o pid=,ppid= | awk -v roots="$*" '
        { children[$2] = children[$2] " " $1 }
        END { n = split(roots, queue, " ")
              for (i = 1; i <= n; i++) { print queue[i]; m = split(children[queue[i]], more, " ")
                                         for (j = 1; j <= m; j++) queue[++n] = more[j] } }'
}

# --- configuration

is_taken() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

free_ports() {  # the first of NODES + 4 neighbours, all free
    local base port
    for _ in $(seq 100); do
        base=$((10000 + RANDOM % 20000))  # below those that the kernel gives away by itself
        for port in $(seq $base $((base + NODES + 3))); do
            is_taken "$port" && continue 2
        done
        echo $base && return
    done
    die "no free ports"
}

configure() {
    local user host base node
    user=$(id -un) host=$(hostname -s) base=$(free_ports)
    umask 022  # munged and slurmdbd refuse what others may write
    mkdir -p "$DIR"/{conf,log,run,state,spool,tmp,dev}
    chmod a+rx "$DIR"  # and munged what others may not enter
    touch "$DIR/.local_cluster"
    for node in $(nodes); do mkdir "$DIR/spool/$node"; done
    cat >"$SLURM_CONF" <<END
ClusterName=local
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$base
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
CredType=cred/munge
# a job that is requeued cannot start again before its credential has expired: two minutes by default
AuthInfo=socket=$DIR/run/munge.sock,cred_expire=5
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
SlurmctldPidFile=$DIR/run/slurmctld.pid
SlurmdPidFile=$DIR/run/%n.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/%n.log
MailProg=/bin/true

ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none

# the nodes have what is said here, not what the machine has
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
GresTypes=gpu
NodeName=node[1-$NODES] NodeHostName=$host NodeAddr=127.0.0.1 Port=[$((base + 3))-$((base + NODES + 2))] CPUs=4 RealMemory=4000
NodeName=node$((NODES + 1)) NodeHostName=$host NodeAddr=127.0.0.1 Port=$((base + NODES + 3)) CPUs=8 RealMemory=4000 Gres=gpu:a100:2

# seconds, where the defaults are minutes
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0,bf_interval=2
SlurmdTimeout=15
MessageTimeout=10
KillWait=5
CompleteWait=0
MinJobAge=86400
ReturnToService=2

# "high" preempts the others, whose jobs get their own signal (sbatch --signal), GraceTime seconds, and are requeued
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
PartitionName=main Nodes=node[1-$NODES] Default=YES MaxTime=INFINITE DefaultTime=10 PriorityTier=1 GraceTime=20
PartitionName=short Nodes=node[1-$NODES] MaxTime=2 DefaultTime=1 PriorityTier=1 GraceTime=20
PartitionName=high Nodes=node[1-$NODES] MaxTime=INFINITE DefaultTime=10 PriorityTier=10 PreemptMode=OFF
PartitionName=gpu Nodes=node$((NODES + 1)) MaxTime=INFINITE DefaultTime=10
PartitionName=mixed Nodes=ALL MaxTime=INFINITE DefaultTime=10

AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$((base + 1))
# not a password: munge's socket, which AuthInfo does not tell this connection
AccountingStoragePass=$DIR/run/munge.sock
JobAcctGatherType=jobacct_gather/none
END
    # a GPU has to be a device
    ln -s /dev/null "$DIR/dev/gpu0" && ln -s /dev/null "$DIR/dev/gpu1"
    echo "NodeName=node$((NODES + 1)) Name=gpu Type=a100 File=$DIR/dev/gpu[0-1]" >"$DIR/conf/gres.conf"
    # nothing uses cgroups, but slurmd loads a plug-in for them, and the one that it would choose dies without a mount
    echo "CgroupPlugin=cgroup/v1" >"$DIR/conf/cgroup.conf"
    (umask 077 && cat >"$DIR/conf/slurmdbd.conf") <<END
AuthType=auth/munge
AuthInfo=socket=$DIR/run/munge.sock
DbdHost=$host
DbdAddr=127.0.0.1
DbdPort=$((base + 1))
SlurmUser=$user
PidFile=$DIR/run/slurmdbd.pid
LogFile=$DIR/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=$((base + 2))
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm
END
    cat >"$DIR/conf/init.sql" <<END
CREATE DATABASE slurm;
CREATE USER slurm@127.0.0.1 IDENTIFIED BY 'slurm';
GRANT ALL ON slurm.* TO slurm@127.0.0.1;
END
}

port() { sed -n "s/^$1=//p" "$DIR"/conf/slurm*.conf | head -1; }

# --- daemons

start_munged() {
    (umask 077 && head -c 1024 /dev/urandom >"$DIR/run/munge.key")
    munged --key-file="$DIR/run/munge.key" --socket="$DIR/run/munge.sock" --pid-file="$DIR/run/munged.pid" \
        --log-file="$DIR/log/munged.log" --seed-file="$DIR/run/munge.seed"
}

start_database() {  # small, and careless of power cuts: it lives as long as the tests
    # a tmpdir of its own: a MariaDB that starts removes the temporary tables of the others in /tmp
    mariadb-install-db --no-defaults --user="$(id -un)" --datadir="$DIR/database" --tmpdir="$DIR/tmp" --skip-test-db \
        --auth-root-authentication-method=normal --innodb-flush-method=nosync --sync-frm=0 >"$DIR/log/mariadb-install.log" 2>&1
    setsid mariadbd --no-defaults --user="$(id -un)" --datadir="$DIR/database" --tmpdir="$DIR/tmp" \
        --bind-address=127.0.0.1 --port="$(port StoragePort)" --socket="$DIR/run/mariadbd.sock" --skip-name-resolve \
        --pid-file="$DIR/run/mariadbd.pid" --log-error="$DIR/log/mariadbd.log" --init-file="$DIR/conf/init.sql" \
        --innodb-buffer-pool-size=64M --innodb-log-file-size=16M --innodb-flush-log-at-trx-commit=0 \
        --innodb-flush-method=nosync --sync-frm=0 --innodb-lock-wait-timeout=900 --performance-schema=0 --skip-log-bin \
        </dev/null >>"$DIR/log/mariadbd.log" 2>&1 &
    wait_for 60 MariaDB is_taken "$(port StoragePort)"
}

start_accounting() {
    slurmdbd
    wait_for 60 slurmdbd is_taken "$(port AccountingStoragePort)"
    sacctmgr -i add cluster local >"$DIR/log/sacctmgr.log" 2>&1
}

start_controller() {
    slurmctld
    wait_for 30 slurmctld is_taken "$(port SlurmctldPort)"
}

has_no_jobs() { [ -z "$(timeout 5 squeue -h)" ]; }

are_nodes_usable() {
    [ "$(sinfo -h -N -p main -o %T | grep -cxE 'idle|mixed|allocated|completing')" = "$NODES" ]
}

# --- commands

install() {
    local missing=() package
    for package in "${PACKAGES[@]}"; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q ' installed$' || missing+=("$package")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
}

start() {
    local node command
    for command in munged slurmctld slurmd slurmdbd sbatch mariadbd; do
        command -v $command >/dev/null || die "there is no $command; '$0 install' installs it"
    done
    [ ! -e "$DIR/conf" ] || die "there is a cluster in $DIR already; '$0 stop' stops it"
    # a start that fails leaves nothing but its logs
    trap 'code=$?; [ $code -eq 0 ] || { say "failed; the logs are in $DIR/log, and end so:"; tail -n 5 "$DIR"/log/* >&2; stop; }' EXIT
    configure
    start_munged
    start_database
    start_accounting
    start_controller
    for node in $(nodes); do slurmd -N "$node"; done
    wait_for 60 "every node" are_nodes_usable
    wait_for 30 sacct sacct -n
}

stop() {
    local node daemon
    [ -e "$DIR/.local_cluster" ] || return 0
    if pid_of slurmctld >/dev/null; then
        timeout 20 squeue -h -o %A 2>/dev/null | sort -u | xargs -r timeout 20 scancel -f 2>/dev/null || true
        wait_for 15 "the jobs to end" has_no_jobs || true
    fi
    for node in $(nodes); do stop_daemon "$node"; done
    # shellcheck disable=SC2046  # one word a process
    with_descendants $(step_daemons) | xargs -r kill -KILL 2>/dev/null || true
    for daemon in slurmctld slurmdbd mariadbd munged; do stop_daemon "$daemon"; done
    (cd "$DIR" && rm -rf conf run state spool tmp dev database)
}

status() {
    local daemon down=()
    [ -e "$SLURM_CONF" ] || { say "there is no cluster in $DIR"; return 1; }
    for daemon in munged mariadbd slurmdbd slurmctld $(nodes); do
        pid_of "$daemon" >/dev/null || down+=("$daemon")
    done
    [ ${#down[@]} -eq 0 ] || { say "down: ${down[*]}"; return 1; }
    timeout 20 sinfo -Nl
    timeout 20 squeue
    are_nodes_usable || { say "not every node can be used"; return 1; }
}

case $DIR in /*) ;; *) die "SLURM_CLUSTER_DIR has to be absolute" ;; esac
[ ! -d "$DIR" ] || [ -e "$DIR/.local_cluster" ] || [ -z "$(ls -A "$DIR")" ] || die "$DIR holds something else"
case ${1:-} in
    install | start | stop | status) "$1" ;;
    start-node) slurmd -N "${2:?which node}" ;;
    env) echo "export SLURM_CONF=$SLURM_CONF" ;;
    *) sed -n '3,15s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
