//! stub
use std::{io, sync::Arc, time::Duration};
use crate::gguf::Gguf;
use crate::Result;
pub struct Read { pub id: u32, pub shard: usize, pub offset: u64, pub len: usize, pub need: usize, pub dest: *mut u8 }
pub trait ReadSource: Send + Sync { fn next(&self, max: usize, wait: bool, out: &mut Vec<Read>) -> bool; fn complete(&self, read: Read, result: io::Result<()>); }
pub trait Link: Send + Sync { fn name(&self) -> &'static str; fn depth(&self) -> usize; fn wake(&self); }
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoKind { Auto, Uring, Pread, Mmap }
pub trait Faults: Send + Sync { fn before(&self, read: &Read) -> Duration; fn after(&self, read: &Read, result: io::Result<usize>) -> io::Result<usize>; }
pub struct Files;
impl Files { pub fn new(_: &Gguf) -> Result<Files> { Ok(Files) } }
pub fn open(_: IoKind, _: Files, _: &[(*mut u8, usize)], _: Option<Arc<dyn Faults>>, _: Arc<dyn ReadSource>) -> Result<Box<dyn Link>> { unreachable!() }
