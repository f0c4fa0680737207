// Copies, adds, fills or reads: one record a sub-executor, execution by execution over its slices.
//
// Specialised by constants, all of which have the values of the default variant here.
#ifndef TB_PRELUDE
#include "prelude.h"
#endif
#ifndef TB_RECORD
#include "record.h"
#endif

#ifndef TB_BLOCK // threads of a block
#define TB_BLOCK 256
#endif
#ifndef TB_UNROLL // words that a thread has in flight
#define TB_UNROLL 8
#endif
#ifndef TB_WORD // floats of a word
#define TB_WORD 4
#endif
#ifndef TB_TEMPORAL // past the caches: 1 loads, 2 stores, 3 both
#define TB_TEMPORAL 0
#endif
#ifndef TB_WAVE_ORDER // which of unroll (U), wave (W) and team (C) lie next to each other
#define TB_WAVE_ORDER 0
#endif
#ifndef TB_SINGLE_TEAM // the sub-executors of a transfer stride over all of it
#define TB_SINGLE_TEAM 0
#endif
#ifndef TB_SE_WARP // a sub-executor is a warp
#define TB_SE_WARP 0
#endif
#ifndef TB_COPY // every record has one source
#define TB_COPY 0
#endif
#ifndef TB_XCC // records are taken by blocks of the XCC that they want
#define TB_XCC 0
#endif

// What a destination gets without a source: byte 75 four times.
#define FILL_BITS 0x4B4B4B4Bu

// A sub-executor's threads, and its place among those that share its elements.
struct Team {
    u32 size, index; // 1 and 0 unless TB_SINGLE_TEAM
    u32 waves, wave, lane;
};

// One execution's addresses.
struct Sides {
    const u64 TB_LOCAL* src;
    const u64 TB_LOCAL* dst;
    u64 src_skip, dst_skip; // to the slice of this execution
    u32 src_count, dst_count;
};

TB_DEVICE u64 src_address(const Sides& sides, u32 i) { return sides.src[i] + sides.src_skip; }
TB_DEVICE u64 dst_address(const Sides& sides, u32 i) { return sides.dst[i] + sides.dst_skip; }

// Distances in units of a wave's words, after TransferBench's GFX_WAVE_ORDER.
TB_DEVICE u64 unroll_stride(const Team& team) {
    switch (TB_WAVE_ORDER) {
    case 2: return team.waves;
    case 3: return (u64)team.waves * team.size;
    case 4: return team.size;
    case 5: return (u64)team.size * team.waves;
    default: return 1;
    }
}
TB_DEVICE u64 wave_stride(const Team& team) {
    switch (TB_WAVE_ORDER) {
    case 0: return TB_UNROLL;
    case 1: return (u64)TB_UNROLL * team.size;
    case 4: return (u64)team.size * TB_UNROLL;
    case 5: return team.size;
    default: return 1;
    }
}
TB_DEVICE u64 team_stride(const Team& team) {
    switch (TB_WAVE_ORDER) {
    case 0: return (u64)TB_UNROLL * team.waves;
    case 1: return TB_UNROLL;
    case 2: return (u64)team.waves * TB_UNROLL;
    case 3: return team.waves;
    default: return 1;
    }
}

// One step of a thread: `TB_UNROLL` words from word `at` on, `stride` apart. All loads are issued before
// the first store. A guarded step leaves out what is not below `words`.
//
// The result folds what was read, for a transfer that stores nothing.
template <int WORD, bool GUARD>
TB_DEVICE u32 step(const Sides& sides, u64 src0, u64 dst0, u64 at, u64 stride, u64 words) {
    typedef typename Word<WORD>::type T;
    T value[TB_UNROLL];
    if (TB_COPY || sides.src_count > 0) {
#pragma unroll
        for (int u = 0; u < TB_UNROLL; u++) {
            if (GUARD) splat(value[u], 0.0f);
            if (!GUARD || at + u * stride < words) load<(TB_TEMPORAL & 1) != 0>(src0 + (at + u * stride) * sizeof(T), value[u]);
        }
    } else {
        union { u32 bits; float f; } fill = {FILL_BITS};
#pragma unroll
        for (int u = 0; u < TB_UNROLL; u++) splat(value[u], fill.f);
    }
    if (!TB_COPY) {
        for (u32 i = 1; i < sides.src_count; i++) {
            u64 src = src_address(sides, i);
            T term[TB_UNROLL];
#pragma unroll
            for (int u = 0; u < TB_UNROLL; u++) {
                if (GUARD) splat(term[u], 0.0f);
                if (!GUARD || at + u * stride < words) load<(TB_TEMPORAL & 1) != 0>(src + (at + u * stride) * sizeof(T), term[u]);
            }
#pragma unroll
            for (int u = 0; u < TB_UNROLL; u++) add(value[u], term[u]);
        }
    }
    if (sides.dst_count == 0) {
        u32 folded = 0;
#pragma unroll
        for (int u = 0; u < TB_UNROLL; u++) folded ^= fold(value[u]);
        return folded;
    }
#pragma unroll
    for (int u = 0; u < TB_UNROLL; u++) {
        if (!GUARD || at + u * stride < words) store<(TB_TEMPORAL & 2) != 0>(dst0 + (at + u * stride) * sizeof(T), value[u]);
    }
    for (u32 i = 1; i < sides.dst_count; i++) {
        u64 dst = dst_address(sides, i);
#pragma unroll
        for (int u = 0; u < TB_UNROLL; u++) {
            if (!GUARD || at + u * stride < words) store<(TB_TEMPORAL & 2) != 0>(dst + (at + u * stride) * sizeof(T), value[u]);
        }
    }
    return 0;
}

// All `words` words that begin `skip` bytes into the slice.
template <int WORD>
TB_DEVICE u32 move_words(const Sides& sides, const Team& team, u64 skip, u64 words) {
    u64 width = lanes();
    u64 stride = unroll_stride(team) * width;
    u64 whole = (u64)team.size * team.waves * TB_UNROLL * width;
    u64 at = (team.index * team_stride(team) + team.wave * wave_stride(team)) * width + team.lane;
    u64 limit = words / whole * whole;
    // Unused without a source or destination.
    u64 src0 = src_address(sides, 0) + skip;
    u64 dst0 = dst_address(sides, 0) + skip;
    Sides from = sides;
    from.src_skip += skip;
    from.dst_skip += skip;
    u32 folded = 0;
    for (; at < limit; at += whole) folded ^= step<WORD, false>(from, src0, dst0, at, stride, words);
    // What is left is less than one step of the team: one more in flight at once, with a guard.
    if (limit < words) folded ^= step<WORD, true>(from, src0, dst0, at, stride, words);
    return folded;
}

// The few elements before the first and after the last whole word.
TB_DEVICE u32 move_edges(const Sides& sides, const Team& team, u64 elements, u32 head, u32 tail) {
    u32 thread = team.wave * lanes() + team.lane;
    if (team.index != 0 || thread >= head + tail) return 0;
    u64 at = (thread < head ? thread : elements - head - tail + thread) * sizeof(float);
    union { u32 bits; float f; } value = {FILL_BITS};
    for (u32 i = 0; i < sides.src_count; i++) {
        float term;
        load<(TB_TEMPORAL & 1) != 0>(src_address(sides, i) + at, term);
        value.f = i == 0 ? term : value.f + term;
    }
    for (u32 i = 0; i < sides.dst_count; i++) store<(TB_TEMPORAL & 2) != 0>(dst_address(sides, i) + at, value.f);
    return value.bits;
}

// One execution. Words need all addresses at the same distance from a word boundary; elements are
// moved one by one if they are not.
TB_DEVICE u32 execute(const Sides& sides, const Team& team, u64 elements) {
    const u32 mask = TB_WORD * sizeof(float) - 1;
    u32 phase = (u32)(sides.src_count > 0 ? src_address(sides, 0) : dst_address(sides, 0)) & mask;
    bool even = true;
    for (u32 i = 0; i < sides.src_count; i++) even = even && (((u32)src_address(sides, i) & mask) == phase);
    for (u32 i = 0; i < sides.dst_count; i++) even = even && (((u32)dst_address(sides, i) & mask) == phase);
    if (!even) return move_words<1>(sides, team, 0, elements);
    u64 head = phase == 0 ? 0 : (mask + 1 - phase) / sizeof(float);
    if (head > elements) head = elements;
    u64 words = (elements - head) / TB_WORD;
    u32 tail = (u32)((elements - head) % TB_WORD);
    u32 folded = move_words<TB_WORD>(sides, team, head * sizeof(float), words);
    if (head + tail > 0) folded ^= move_edges(sides, team, elements, (u32)head, tail);
    return folded;
}

// The barrier of a sub-executor's threads.
TB_DEVICE void team_barrier() {
    if (TB_SE_WARP) warp_barrier();
    else block_barrier();
}

// One sub-executor, by a block or by a warp, which is number `slot` of its block.
TB_DEVICE void run(const TransferArgs& args, u64 number, u32 slot, u64 TB_LOCAL* addresses) {
    const u32 width = lanes();
    const u32 leader = TB_SE_WARP ? slot * width : 0;
    const bool leads = thread_index() == leader;
    u64 start = 0;
    if (leads) start = ticks();

    SubExecutorRecord TB_GLOBAL* record = (SubExecutorRecord TB_GLOBAL*)args.records + number;
    const u32 thread = thread_index() - leader;
    if (thread < MAX_SIDES) addresses[thread] = record->src[thread];
    else if (thread < 2 * MAX_SIDES) addresses[thread] = record->dst[thread - MAX_SIDES];
    team_barrier();

    Team team;
    team.size = TB_SINGLE_TEAM ? record->team_size : 1;
    team.index = TB_SINGLE_TEAM ? record->team_index : 0;
    team.waves = TB_SE_WARP ? 1 : TB_BLOCK / width;
    team.wave = TB_SE_WARP ? 0 : thread / width;
    team.lane = thread % width;
    Sides sides;
    sides.src = addresses;
    sides.dst = sides.src + MAX_SIDES;
    sides.src_count = TB_COPY ? 1 : record->src_count;
    sides.dst_count = record->dst_count;

    const u64 elements = record->elements;
    const u64 src_slices = record->src_slices, dst_slices = record->dst_slices;
    const u64 src_stride = record->src_stride, dst_stride = record->dst_stride;
    u64 src_slice = args.first % src_slices, dst_slice = args.first % dst_slices;
    u32 folded = 0;
    // No barrier between executions: each moves its own data, and the next may fill the pipeline.
    for (u32 execution = 0; execution < args.executions; execution++) {
        sides.src_skip = src_slice * src_stride;
        sides.dst_skip = dst_slice * dst_stride;
        folded ^= execute(sides, team, elements);
        src_slice = src_slice + 1 == src_slices ? 0 : src_slice + 1;
        dst_slice = dst_slice + 1 == dst_slices ? 0 : dst_slice + 1;
    }
    // Never true, which the compiler cannot know: it has to keep the loads of a transfer that stores nothing.
    if (sides.dst_count > MAX_SIDES) record->stop_ticks = folded;

    drain_stores();
    team_barrier();
    if (leads) {
        system_fence();
        u64 stop = ticks();
        record->start_ticks = start;
        record->stop_ticks = stop;
    }
}

// The first record that nobody has taken and that wants this XCC or any, or `count`.
TB_DEVICE u64 take(const TransferArgs& args) {
    const u32 any = ~0u, here = xcc_id();
    u64 ticket = args.records + (u64)args.count * sizeof(SubExecutorRecord);
    for (u32 number = 0; number < args.count; number++, ticket += 2 * sizeof(u32)) {
        u32 wanted = *(const u32 TB_GLOBAL*)ticket;
        if ((wanted == any || wanted == here) && atomic_exchange(ticket + sizeof(u32), 1) == 0) return number;
    }
    return args.count;
}

TB_KERNEL(TB_BLOCK) tb_transfer(TransferArgs args) {
    const u32 width = lanes();
    const u32 slot = TB_SE_WARP ? thread_index() / width : 0;
    TB_SHARED u64 addresses[TB_SE_WARP ? TB_BLOCK / 32 : 1][2 * MAX_SIDES];
#if TB_XCC
    // Until none is left, since a block that came early may be the only one here.
    TB_SHARED u64 taken[TB_SE_WARP ? TB_BLOCK / 32 : 1];
    for (;;) {
        if (thread_index() == (TB_SE_WARP ? slot * width : 0)) taken[slot] = take(args);
        team_barrier();
        u64 number = taken[slot];
        if (number >= args.count) return;
        run(args, number, slot, (u64 TB_LOCAL*)addresses[slot]);
        team_barrier();
    }
#else
    const u64 number = TB_SE_WARP ? (u64)block_index() * (TB_BLOCK / width) + slot : block_index();
    // Whole sub-executors leave, so nobody waits for them at a barrier.
    if (number >= args.count) return;
    run(args, number, slot, (u64 TB_LOCAL*)addresses[slot]);
#endif
}
