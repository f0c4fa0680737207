// What a kernel that moves data is told: one record a sub-executor, and the arguments of a launch.
#ifndef TB_RECORD
#define TB_RECORD
#ifndef TB_PRELUDE
#include "prelude.h"
#endif

#define MAX_SIDES 8

// The layout of `gpu::SubExecutorRecord`.
struct SubExecutorRecord {
    u64 elements;
    u32 src_count, dst_count;
    u32 team_size, team_index;
    u64 src[MAX_SIDES], dst[MAX_SIDES];
    u64 src_stride, src_slices;
    u64 dst_stride, dst_slices;
    u64 start_ticks, stop_ticks;
};
static_assert(sizeof(SubExecutorRecord) == 200, "layout of gpu::SubExecutorRecord");
TB_LAYOUT(SubExecutorRecord, team_size, 16);
TB_LAYOUT(SubExecutorRecord, src, 24);
TB_LAYOUT(SubExecutorRecord, dst, 88);
TB_LAYOUT(SubExecutorRecord, src_stride, 152);
TB_LAYOUT(SubExecutorRecord, start_ticks, 184);

// The layout of `gpu::TransferArgs`.
struct TransferArgs {
    u64 records;
    u64 first;
    u32 executions;
    u32 count;
};
static_assert(sizeof(TransferArgs) == 24, "layout of gpu::TransferArgs");
TB_LAYOUT(TransferArgs, count, 20);

#endif
