// Copies by bulk asynchronous copies through shared memory: one record a block, one source, one destination.
//
// One thread keeps a ring of stages busy, across executions: while some stages fill, others drain. PTX
// ISA, "cp.async.bulk" and "mbarrier": sm_90 and later, 16-byte addresses and sizes; what is left at
// the ends is moved by the other threads.
#ifndef TB_PRELUDE
#include "prelude.h"
#endif
#ifndef TB_RECORD
#include "record.h"
#endif

#ifndef TB_BLOCK // threads of a block
#define TB_BLOCK 64
#endif
#ifndef TB_STAGES // pieces of the ring
#define TB_STAGES 8
#endif
#ifndef TB_STAGE_BYTES // a multiple of 128
#define TB_STAGE_BYTES 16384
#endif

static_assert(TB_STAGES >= 2 && TB_STAGE_BYTES % 128 == 0, "a ring of whole pieces");

// Stages that fill; the others drain.
#define AHEAD (TB_STAGES - TB_STAGES / 2)
#define BEHIND (TB_STAGES / 2)

extern __shared__ __align__(128) unsigned char ring[];

TB_DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

TB_DEVICE void barrier_init(u32 barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

// The copy engine of the multiprocessor sees the barriers that this thread has made.
TB_DEVICE void barriers_made() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

TB_DEVICE void barrier_wait(u32 barrier, u32 parity) {
    u32 done;
    do {
        asm volatile("{\n.reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    } while (!done);
}

TB_DEVICE void fill_stage(u32 stage, u64 src, u32 bytes, u32 barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(stage), "l"(src), "r"(bytes), "r"(barrier) : "memory");
}

TB_DEVICE void drain_stage(u64 dst, u32 stage, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 ::"l"(dst), "r"(stage), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// All but the last BEHIND stages that were drained may be filled again.
TB_DEVICE void wait_for_stage() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(BEHIND) : "memory"); }
// All writes but the last PENDING are there.
template <int PENDING> TB_DEVICE void wait_for_writes() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Goes through the pieces of a part, execution by execution.
struct Walk {
    u64 piece, pieces; // of an execution
    u64 src_slice, dst_slice;
};

TB_DEVICE void advance(Walk& walk, const SubExecutorRecord TB_GLOBAL* record) {
    if (++walk.piece < walk.pieces) return;
    walk.piece = 0;
    walk.src_slice = walk.src_slice + 1 == record->src_slices ? 0 : walk.src_slice + 1;
    walk.dst_slice = walk.dst_slice + 1 == record->dst_slices ? 0 : walk.dst_slice + 1;
}

// `words` words of 16 bytes of every execution, from `skip` bytes into each slice.
TB_DEVICE void move_words(const SubExecutorRecord TB_GLOBAL* record, const TransferArgs& args, u64 skip, u64 words) {
    TB_SHARED u64 full[TB_STAGES];
    for (u32 i = 0; i < TB_STAGES; i++) barrier_init(shared_address(&full[i]));
    barriers_made();

    const u64 bytes = words * 16;
    const u64 src = record->src[0] + skip, dst = record->dst[0] + skip;
    const u64 src_stride = record->src_stride, dst_stride = record->dst_stride;
    Walk in;
    in.piece = 0;
    in.pieces = (bytes + TB_STAGE_BYTES - 1) / TB_STAGE_BYTES;
    in.src_slice = args.first % record->src_slices;
    in.dst_slice = args.first % record->dst_slices;
    Walk out = in;
    const u64 total = in.pieces * args.executions;
    // Writes of two executions to one address have no order of their own: the later one waits.
    const bool overwrites = args.executions > record->dst_slices;
    const bool at_once = in.pieces * record->dst_slices <= BEHIND;
    // The numbers of stage and round go with each end, so that nothing is divided on the way.
    u32 in_stage = 0, out_stage = 0, parity = 0;
    const u32 last = (u32)(bytes - (in.pieces - 1) * TB_STAGE_BYTES);

    for (u64 number = 0; number < total + AHEAD; number++) {
        if (number >= AHEAD) {
            const u64 at = out.piece * TB_STAGE_BYTES;
            const u32 size = out.piece + 1 == out.pieces ? last : TB_STAGE_BYTES;
            barrier_wait(shared_address(&full[out_stage]), parity);
            if (overwrites && at_once) wait_for_writes<0>();
            else if (overwrites) wait_for_writes<BEHIND>();
            drain_stage(dst + out.dst_slice * dst_stride + at, shared_address(ring) + out_stage * TB_STAGE_BYTES, size);
            if (++out_stage == TB_STAGES) out_stage = 0, parity ^= 1;
            advance(out, record);
        }
        if (number < total) {
            const u64 at = in.piece * TB_STAGE_BYTES;
            const u32 size = in.piece + 1 == in.pieces ? last : TB_STAGE_BYTES;
            if (number >= TB_STAGES) wait_for_stage();
            fill_stage(shared_address(ring) + in_stage * TB_STAGE_BYTES, src + in.src_slice * src_stride + at, size,
                       shared_address(&full[in_stage]));
            if (++in_stage == TB_STAGES) in_stage = 0;
            advance(in, record);
        }
    }
    wait_for_writes<0>();
}

// The elements before `head` and from `tail` on, of every execution.
TB_DEVICE void move_ends(const SubExecutorRecord TB_GLOBAL* record, const TransferArgs& args, u64 head, u64 tail) {
    const u64 count = head + (record->elements - tail);
    u64 src_slice = args.first % record->src_slices, dst_slice = args.first % record->dst_slices;
    for (u32 execution = 0; execution < args.executions; execution++) {
        const u64 src = record->src[0] + src_slice * record->src_stride;
        const u64 dst = record->dst[0] + dst_slice * record->dst_stride;
        for (u64 i = thread_index() - 1; i < count; i += TB_BLOCK - 1) {
            const u64 at = (i < head ? i : tail + (i - head)) * sizeof(float);
            float1_t value;
            load<false>(src + at, value);
            store<false>(dst + at, value);
        }
        src_slice = src_slice + 1 == record->src_slices ? 0 : src_slice + 1;
        dst_slice = dst_slice + 1 == record->dst_slices ? 0 : dst_slice + 1;
    }
}

TB_KERNEL(TB_BLOCK) tb_bulk(TransferArgs args) {
    if (block_index() >= args.count) return;
    SubExecutorRecord TB_GLOBAL* record = (SubExecutorRecord TB_GLOBAL*)args.records + block_index();
    const bool leads = thread_index() == 0;
    u64 start = 0;
    if (leads) start = ticks();

    // Strides are multiples of 16, so all slices have the phase of the first.
    const u32 phase = (u32)record->src[0] & 15;
    u64 head = phase == 0 ? 0 : (16 - phase) / sizeof(float);
    if (head > record->elements) head = record->elements;
    u64 words = (record->elements - head) / 4;
    if (((u32)record->dst[0] & 15) != phase) words = 0;
    if (leads) {
        if (words > 0 && args.executions > 0) move_words(record, args, head * sizeof(float), words);
    } else {
        move_ends(record, args, head, head + words * 4);
    }

    drain_stores();
    block_barrier();
    if (leads) {
        system_fence();
        u64 stop = ticks();
        record->start_ticks = start;
        record->stop_ticks = stop;
    }
}
