//! A buffer whose executions walk through its slices.

use crate::plan::rotation::Layout;
use crate::region::{Address, Region};

/// A buffer whose executions walk through its slices.
#[derive(Clone, Debug)]
pub struct Rotating {
    region: Region,
    layout: Layout,
}

impl Rotating {
    /// # Panics
    /// If the region is smaller than the layout.
    pub fn new(region: Region, layout: Layout) -> Rotating {
        assert!(layout.total() <= region.bytes(), "the region holds its layout");
        Rotating { region, layout }
    }

    /// Where the n-th execution reads or writes; `layout.bytes` bytes from there are mapped.
    pub fn slice(&self, n: u64) -> Address {
        Address(self.region.address().0 + self.layout.slice_offset(n))
    }

    /// The same as a region, for work outside the timed part.
    pub fn slice_region(&self, n: u64) -> Region {
        self.region.part(self.layout.slice_offset(n), self.layout.bytes)
    }

    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    pub fn region(&self) -> &Region {
        &self.region
    }
}
