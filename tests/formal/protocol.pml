/* Lane, turn, commit and pins of one shard as a Promela model: every interleaving, with a worker that dies at any step or never.
 *
 * Each worker posts, tries the turn, and pulls; whoever gets the turn drains all lanes, folds into a buffer that nobody reads,
 * writes the other record, and flips. Names are those of kernels/holder.pyx, commit.pyx and turn.pyx; one statement is one access
 * to shared memory, and `atomic` is one read-modify-write. What is checked:
 *
 *   - every push that was posted is folded exactly once, also one of a worker that died;
 *   - a pinned buffer holds the version that its reader pinned until the reader lets go;
 *   - nobody waits for ever: an end where somebody still waits is an invalid end state.
 *
 * What it refuses to be: a model of weak memory orders, of timers, of shared folds, or of what the scheduler decides (each push
 * is folded when it is seen). Mutants, for a model that finds nothing proves nothing: -DFORGET_PENDING, -DFLIP_FIRST,
 * -DFORGET_RECHECK, -DFORGET_PINS, -DKEEP_TURN.
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

/* The commit word, always read and written whole: which record is true, of which version, in which buffer; the breaker's epoch. */
byte version, buffer, epoch;
bit record;

/* What a record says; the scheduler's state in short: how many descriptors of each lane are folded. */
typedef Record {
    byte cursor[WORKERS]
};
Record records[2];

/* Ghosts: what only the checker sees. */
byte content[BUFFERS]; /* the version whose weights a buffer holds, or DIRTY */
byte folded[4];        /* by lane and step: how often */
bit dead[WORKERS];
byte ended;

/* Flip: compare and swap of the commit word. What lies between the records' cursors is folded by it. */
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
        :: else -> skip /* a late owner: nothing happened */
        fi
    }
}

/* Holder._drain: commits, until nothing new is seen. */
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
        /* Commit._free_buffer: the pins, one after the other. */
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

/* Holder.run: drain, and let go unless somebody was told that it will be seen. */
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

/* Holder.take and run. */
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

/* Lane.break_turn: the turn of one who is proved dead, then the commit word's epoch. What it left half written lies in the record
 * that every commit writes whole here. */
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

/* Lane.pull, and some reading. */
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
        /* Worker.wait_for_others: until everything is folded; who is dead may hold the turn. Nobody tries again for a push that
         * a turn has promised to see: that is what PENDING is for. */
        do
        :: ALL_FOLDED(0) && ALL_FOLDED(1) && (dead[1 - me] || tail[1 - me] == PUSHES) -> break
        :: dead[1 - me] && turn == 1 - me -> break_turn(1 - me)
        :: dead[1 - me] && turn == NOBODY && !(ALL_FOLDED(0) && ALL_FOLDED(1)) -> try_turn()
        od;
        pin[me] = 0;
        ended++
    } unless { dead[me] }
}

/* Perhaps one worker dies, at any moment. */
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
    /* Everyone has ended: the ledger. */
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
