//! The parameters of kernels: one struct for each family of kernels, with the fields of the struct
//! of the same name in `kernels`. Both sides assert the struct's size, and `tests/gpu/ptx.rs`
//! compares the names, types and offsets of all fields.

use super::{Device, DeviceSlice, KernelId};
use crate::Result;
use bytemuck::{Pod, Zeroable};
use std::marker::PhantomData;

/// An address in device memory, `Address<T>` in kernels. It comes from a slice of a buffer, or is
/// null.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct DevicePtr(u64);

impl From<DeviceSlice<'_>> for DevicePtr {
    fn from(slice: DeviceSlice) -> DevicePtr {
        DevicePtr(slice.address())
    }
}

impl From<Option<DeviceSlice<'_>>> for DevicePtr {
    fn from(slice: Option<DeviceSlice>) -> DevicePtr {
        DevicePtr(slice.map_or(0, DeviceSlice::address))
    }
}

/// A size as kernels count it.
///
/// # Panics
/// If it does not fit a u32.
pub fn u32_of(n: usize) -> u32 {
    u32::try_from(n).expect("a size that kernels can count")
}

/// One field of a parameter struct.
#[derive(Debug)]
pub struct Field {
    pub name: &'static str,
    /// The type's name in Rust: DevicePtr, u64, u32 or f32.
    pub ty: &'static str,
    pub offset: usize,
    pub size: usize,
}

/// The memory layout of a parameter struct, which has no padding.
#[derive(Debug)]
pub struct Layout {
    /// The struct's name, in Rust and in `kernels`.
    pub name: &'static str,
    pub size: usize,
    /// In order.
    pub fields: &'static [Field],
}

/// A parameter struct, made by `kernel_params!`.
pub trait KernelParams: Pod {
    const LAYOUT: &'static Layout;
}

/// Defines a parameter struct and its size in bytes:
/// `kernel_params! { pub struct XParams[16] { x: DevicePtr, n: u32, unused: u32, } }`.
macro_rules! kernel_params {
    (
        $(#[$doc:meta])*
        pub struct $name:ident[$size:literal] {
            $($(#[$field_doc:meta])* $field:ident: $ty:ident,)+
        }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
        #[repr(C)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $ty,)+
        }

        const _: () = assert!(size_of::<$name>() == $size);

        impl $crate::backend::gpu::KernelParams for $name {
            const LAYOUT: &'static $crate::backend::gpu::Layout = &$crate::backend::gpu::Layout {
                name: stringify!($name),
                size: $size,
                fields: &[$($crate::backend::gpu::Field {
                    name: stringify!($field),
                    ty: stringify!($ty),
                    offset: std::mem::offset_of!($name, $field),
                    size: size_of::<$ty>(),
                }),+],
            };
        }
    };
}
pub(crate) use kernel_params;

/// Defines a family of kernels, which `load` finds on a device:
/// `kernels! { pub struct Xs { x: XParams = "name_in_kernels", } }`.
macro_rules! kernels {
    (
        $(#[$doc:meta])*
        pub struct $family:ident { $($kernel:ident: $params:ty = $name:literal,)+ }
    ) => {
        $(#[$doc])*
        pub struct $family {
            $($kernel: $crate::backend::gpu::Kernel<$params>,)+
        }

        impl $family {
            pub fn load(gpu: &$crate::backend::gpu::Device) -> $crate::Result<$family> {
                Ok($family { $($kernel: $crate::backend::gpu::Kernel::find(gpu, $name)?,)+ })
            }
        }
    };
}
pub(crate) use kernels;

/// A kernel of the device that it was found on, with the type of its parameters. It is found once
/// and launched many times.
pub struct Kernel<P> {
    pub(in crate::backend) id: KernelId,
    params: PhantomData<fn(P)>,
}

impl<P> Clone for Kernel<P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P> Copy for Kernel<P> {}

impl<P: KernelParams> Kernel<P> {
    /// The kernel of this name; an error if there is none, or if it takes other parameters.
    pub fn find(gpu: &Device, name: &str) -> Result<Kernel<P>> {
        // It may be the first of its module, which is loaded into the device's memory.
        let _changing = gpu.host_waits().change_memory();
        Ok(Kernel { id: gpu.kernel(name, P::LAYOUT)?, params: PhantomData })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    kernel_params! {
        /// A struct with every kind of field.
        pub struct AllKindsParams[24] {
            x: DevicePtr,
            stride: u64,
            scale: f32,
            n: u32,
        }
    }

    #[test]
    fn a_layout_has_the_fields_in_order() {
        let layout = AllKindsParams::LAYOUT;
        let fields = layout.fields.iter().map(|f| (f.name, f.ty, f.offset, f.size));
        let expected = [
            ("x", "DevicePtr", 0, 8),
            ("stride", "u64", 8, 8),
            ("scale", "f32", 16, 4),
            ("n", "u32", 20, 4),
        ];
        assert!(fields.eq(expected), "{layout:?}");
        assert_eq!((layout.name, layout.size), ("AllKindsParams", 24));
    }
}
