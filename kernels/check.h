// Compares memory with expected bytes: adds the number of differing bytes, lowers the first offset.
#ifndef TB_PRELUDE
#include "prelude.h"
#endif

#define CHECK_BLOCK_MAX 1024

// The layout of `gpu::CheckArgs`.
struct CheckArgs {
    u64 actual;
    u64 expected;
    u64 bytes;  // a multiple of 4, as are the addresses
    u64 result; // count, first offset
};
static_assert(sizeof(CheckArgs) == 32, "layout of gpu::CheckArgs");
TB_LAYOUT(CheckArgs, result, 24);

// What one thread has seen.
struct Seen {
    u64 wrong, first;
};

TB_DEVICE void compare(Seen& seen, u32 actual, u32 expected, u64 offset) {
    u32 differs = actual ^ expected;
    if (differs == 0) return;
    for (u32 byte = 4; byte-- > 0;) {
        if ((differs >> (8 * byte) & 0xFF) == 0) continue;
        seen.wrong++;
        if (offset + byte < seen.first) seen.first = offset + byte;
    }
}

TB_KERNEL(CHECK_BLOCK_MAX) tb_check(CheckArgs args) {
    Seen seen = {0, ~0ull};
    const u64 thread = (u64)block_index() * block_threads() + thread_index();
    const u64 threads = grid_threads();
    u64 whole = 0;
    if (((args.actual | args.expected) & 15) == 0) {
        whole = args.bytes / 16;
        for (u64 i = thread; i < whole; i += threads) {
            float4_t a, e;
            load<false>(args.actual + 16 * i, a);
            load<false>(args.expected + 16 * i, e);
            compare(seen, bits(a.x), bits(e.x), 16 * i);
            compare(seen, bits(a.y), bits(e.y), 16 * i + 4);
            compare(seen, bits(a.z), bits(e.z), 16 * i + 8);
            compare(seen, bits(a.w), bits(e.w), 16 * i + 12);
        }
    }
    for (u64 i = 4 * whole + thread; i < args.bytes / 4; i += threads) {
        float a, e;
        load<false>(args.actual + 4 * i, a);
        load<false>(args.expected + 4 * i, e);
        compare(seen, bits(a), bits(e), 4 * i);
    }
    if (seen.wrong > 0) {
        atomic_add(args.result, seen.wrong);
        atomic_min(args.result + 8, seen.first);
    }
}
