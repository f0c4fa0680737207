//! Device structs as bytes: what the host writes, kernels read, and the host reads back.

use std::mem::offset_of;

use super::{CheckArgs, LatchArgs, SubExecutorRecord, TransferArgs};

/// Makes a padding-free `repr(C)` struct of plain integers convertible to and from its bytes.
macro_rules! bytes_of {
    ($name:ident, $size:literal) => {
        impl $name {
            pub const SIZE: usize = $size;

            pub fn to_bytes(self) -> [u8; $size] {
                // SAFETY: the struct is `repr(C)`, made of integers only, and as long as its fields
                // together (checked below), so every byte is initialised.
                unsafe { std::mem::transmute(self) }
            }

            pub fn from_bytes(bytes: [u8; $size]) -> $name {
                // SAFETY: every bit pattern is a value of a struct of integers.
                unsafe { std::mem::transmute(bytes) }
            }
        }
    };
}

bytes_of!(SubExecutorRecord, 200);
bytes_of!(TransferArgs, 24);
bytes_of!(CheckArgs, 32);
bytes_of!(LatchArgs, 32);

// No padding: the sizes are those of the fields together.
const _: () = assert!(SubExecutorRecord::SIZE == 8 + 4 * 4 + 2 * 8 * super::MAX_SIDES + 4 * 8 + 2 * 8);
const _: () = assert!(TransferArgs::SIZE == 2 * 8 + 2 * 4);
const _: () = assert!(CheckArgs::SIZE == 4 * 8);
const _: () = assert!(LatchArgs::SIZE == 3 * 8 + 2 * 4);

// The same numbers stand in the `static_assert`s of the kernels.
const _: () = assert!(offset_of!(SubExecutorRecord, team_size) == 16);
const _: () = assert!(offset_of!(SubExecutorRecord, src) == 24);
const _: () = assert!(offset_of!(SubExecutorRecord, dst) == 88);
const _: () = assert!(offset_of!(SubExecutorRecord, src_stride) == 152);
const _: () = assert!(offset_of!(SubExecutorRecord, start_ticks) == 184);
const _: () = assert!(offset_of!(TransferArgs, count) == 20);
const _: () = assert!(offset_of!(CheckArgs, result) == 24);
const _: () = assert!(offset_of!(LatchArgs, value) == 24);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::MAX_SIDES;

    #[test]
    fn fields_lie_where_the_kernels_read_them() {
        let mut src = [0; MAX_SIDES];
        src[7] = 0x77;
        let record = SubExecutorRecord {
            elements: 1,
            src_count: 2,
            dst_count: 3,
            team_size: 11,
            team_index: 12,
            src,
            dst: [4; MAX_SIDES],
            src_stride: 5,
            src_slices: 6,
            dst_stride: 7,
            dst_slices: 8,
            start_ticks: 9,
            stop_ticks: 10,
        };
        let bytes = record.to_bytes();
        for (offset, value) in
            [(0, 1), (8, 2), (12, 3), (16, 11), (20, 12), (80, 0x77), (88, 4), (152, 5), (176, 8), (184, 9), (192, 10)]
        {
            assert_eq!(bytes[offset], value, "offset {offset}");
        }
        assert_eq!(SubExecutorRecord::from_bytes(bytes), record);
    }
}
