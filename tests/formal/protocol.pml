/* Promela model of one shard's lanes, shard lock, commit and pins: every interleaving, with a worker that dies at any step or
 * never.
 *
 * Each worker posts, tries the shard lock, and pulls. The combiner, which has the lock, drains all lanes, folds into a buffer
 * that no worker reads, writes the other record, and flips the commit word. The names follow those of kernels/combining. One
 * statement is one access to shared memory, and `atomic` is one read-modify-write. The model checks that:
 *
 *   - every posted push is folded exactly once, also that of a worker that died;
 *   - a pinned buffer holds the version that its reader pinned until the reader unpins it;
 *   - no worker waits forever: an end in which a worker still waits is an invalid end state.
 *
 * Not modelled: weak memory orders, timers, shared folds, and the scheduler's decisions (each push is folded when it is seen).
 * Mutants show that the checks find errors: -DFORGET_PENDING, -DFLIP_FIRST, -DFORGET_RECHECK, -DFORGET_PINS, -DKEEP_TURN.
 *
 *   spin -a protocol.pml && cc -O2 -DSAFETY -DCOLLAPSE -o pan pan.c && ./pan -m100000
 */
#define WORKERS 2
#ifndef PUSHES
#define PUSHES 2
#endif
#define BUFFERS 4 /* WORKERS + 2 */
#define NOBODY 7
#define DIRTY 15

/* Words of the arena. */
byte tail[WORKERS];
byte turn = NOBODY;
bit pending;
byte pin[WORKERS]; /* buffer + 1, or 0 */

/* The commit word, always read and written whole: the valid record, its version and buffer, and the epoch of lock recovery. */
byte version, buffer, epoch;
bit record;

/* A record. It stands for the scheduler state: the number of folded descriptors of each lane. */
typedef Record {
    byte cursor[WORKERS]
};
Record records[2];

/* Ghost variables, which only the checks read. */
byte content[BUFFERS]; /* the version whose weights a buffer holds, or DIRTY */
byte folded[4];        /* by lane and step: the number of folds */
bit dead[WORKERS];
byte ended;

/* Flip: compare and swap of the commit word. It folds the pushes between the two records' cursors. */
inline flip(seen_version, seen_epoch, fresh) {
    atomic {
        if
        :: version == seen_version && epoch == seen_epoch ->
            i = 0;
            do
            :: i < WORKERS ->
                position = records[record].cursor[i];
                assert(position <= records[1 - record].cursor[i]);
                do
                :: position < records[1 - record].cursor[i] ->
                    folded[i * PUSHES + position] = folded[i * PUSHES + position] + 1;
                    assert(folded[i * PUSHES + position] == 1);
                    position++
                :: else -> break
                od;
                i++
            :: else -> break
            od;
            i = 0;
            position = 0;
            record = 1 - record;
            version = version + 1;
            buffer = fresh
        :: else -> skip /* a fenced combiner: no effect */
        fi
    }
}

/* Drain: commit until no new push is seen. */
inline drain() {
    do
    :: atomic { seen_version = version; seen_epoch = epoch; seen_buffer = buffer };
        look[0] = tail[0];
        look[1] = tail[1];
        if
        :: look[0] == records[record].cursor[0] && look[1] == records[record].cursor[1] -> break
        :: else
        fi;
#ifdef FLIP_FIRST
        flip(seen_version, seen_epoch, (buffer + 1) % BUFFERS);
#endif
        /* Find a free buffer: read the pins one after the other. */
        taken = 1 << seen_buffer;
#ifndef FORGET_PINS
        atomic { if :: pin[0] > 0 -> taken = taken | (1 << (pin[0] - 1)) :: else fi };
        atomic { if :: pin[1] > 0 -> taken = taken | (1 << (pin[1] - 1)) :: else fi };
#endif
        atomic {
            fresh = 0;
            do
            :: (taken >> fresh) & 1 -> fresh++
            :: else -> break
            od;
            assert(fresh < BUFFERS)
        };
        content[fresh] = DIRTY;
        content[fresh] = seen_version + 1;
        records[1 - record].cursor[0] = look[0];
        records[1 - record].cursor[1] = look[1];
#ifndef FLIP_FIRST
        flip(seen_version, seen_epoch, fresh)
#endif
    od
}

/* Run as combiner: drain, and release the lock unless PENDING promises a worker that its push will be seen. */
inline run_turn() {
    do
    :: drain();
#ifdef KEEP_TURN
        break;
#endif
        atomic {
            if
            :: turn == me && !pending -> turn = NOBODY; break
            :: else
            fi
        };
        atomic { assert(turn == me); pending = 0 }
    od
}

/* Take the shard lock and run as combiner, or leave PENDING to the present combiner. */
inline try_turn() {
    do
    :: atomic { seen_turn = turn; seen_pending = pending };
        if
        :: seen_turn == NOBODY ->
            atomic {
                if
                :: turn == NOBODY && pending == seen_pending -> turn = me; pending = 0; mine = 1
                :: else
                fi
            };
            if
            :: mine -> mine = 0; run_turn(); break
            :: else
            fi
        :: else ->
            atomic {
                seen_turn = turn;
#ifndef FORGET_PENDING
                pending = 1
#endif
            };
            if
            :: seen_turn != NOBODY -> break
            :: else
            fi
        fi
    od
}

/* Lock recovery: take over the lock of a worker that is proved dead, then raise the commit word's epoch. A half-written record
 * of the victim does no harm, because every commit in this model writes the whole record. */
inline break_turn(victim) {
    atomic {
        if
        :: turn == victim && dead[victim] -> turn = me; pending = 0; mine = 1
        :: else
        fi
    };
    if
    :: mine ->
        mine = 0;
        epoch = epoch + 1;
        run_turn()
    :: else
    fi
}

/* Pull, and read the weights. */
inline pull() {
    do
    :: atomic { seen_version = version; seen_epoch = epoch; seen_buffer = buffer };
        pin[me] = seen_buffer + 1;
#ifndef FORGET_RECHECK
        atomic {
            if
            :: version == seen_version && epoch == seen_epoch -> break
            :: else
            fi
        }
#else
        break
#endif
    od;
    assert(content[seen_buffer] == seen_version);
    assert(content[seen_buffer] == seen_version)
}

#define ALL_FOLDED(lane) (records[record].cursor[lane] == tail[lane])

proctype worker(byte me) {
    byte step, i, position, seen_turn, seen_version, seen_epoch, seen_buffer, fresh, taken;
    byte look[WORKERS];
    bit seen_pending, mine;
    {
        pull();
        do
        :: step < PUSHES ->
            tail[me] = tail[me] + 1;
            step++;
            try_turn();
            pull()
        :: else -> break
        od;
        /* Worker.wait_for_others: wait until every push is folded. A dead worker may hold the lock. No worker retries for a
         * push that PENDING promises to be seen. */
        do
        :: ALL_FOLDED(0) && ALL_FOLDED(1) && (dead[1 - me] || tail[1 - me] == PUSHES) -> break
        :: dead[1 - me] && turn == 1 - me -> break_turn(1 - me)
        :: dead[1 - me] && turn == NOBODY && !(ALL_FOLDED(0) && ALL_FOLDED(1)) -> try_turn()
        od;
        pin[me] = 0;
        ended++
    } unless { dead[me] }
}

/* At most one worker dies, at any moment. */
active proctype killer() {
    if
    :: dead[0] = 1
    :: skip
    fi
}

init {
    atomic {
        content[1] = DIRTY;
        content[2] = DIRTY;
        content[3] = DIRTY;
        run worker(0);
        run worker(1)
    };
    /* All workers have ended: check the push outcomes. */
    (ended + dead[0] >= WORKERS);
    byte lane, position;
    do
    :: lane < WORKERS ->
        position = 0;
        do
        :: position < tail[lane] -> assert(folded[lane * PUSHES + position] == 1); position++
        :: else -> break
        od;
        lane++
    :: else -> break
    od
}
