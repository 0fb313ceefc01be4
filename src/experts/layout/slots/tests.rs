//! Every read executed as a link would, scattered, and the slots compared with the file in place.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use proptest::sample::select;

use super::*;
use crate::experts::Geometry;
use crate::gguf::{TensorType, Writer};
use TensorType::{F16, F32, Q4_0, Q4_K, Q6_K, Q8_0};

/// A layer to write: `types` of gate, up and down.
#[derive(Clone, Debug)]
struct Shape {
    types: [TensorType; 3],
    is_gated: bool,
    n_embd: usize,
    n_ff: usize,
    granule_rows: usize,
    n_experts: usize,
    alignment: u32,
    /// Bytes of another tensor before the experts.
    before: u64,
    /// The tensors are distributed over two files.
    split: bool,
}

impl Shape {
    fn layer(&self, tensors: ExpertTensors) -> LayerExperts {
        let part = |ty: TensorType, rows: usize, cols: usize| MatrixRows {
            rows,
            row_bytes: ty.row_bytes(cols as u64).unwrap() as usize,
            block_len: ty.block_len(),
            block_bytes: ty.block_bytes(),
        };
        LayerExperts {
            n_experts: self.n_experts,
            geometry: Geometry { n_ff: self.n_ff, granule_rows: self.granule_rows },
            gate: match self.is_gated {
                true => part(self.types[0], self.n_ff, self.n_embd),
                false => MatrixRows::absent(self.n_ff),
            },
            up: part(self.types[1], self.n_ff, self.n_embd),
            down: part(self.types[2], self.n_embd, self.n_ff),
            tensors,
        }
    }

    fn n_granules(&self) -> usize {
        self.n_ff.div_ceil(self.granule_rows)
    }

    /// The stacked layer in a file, or two, of `dir`.
    fn write_stacked(&self, dir: &Path) -> (Gguf, LayerExperts) {
        let (e, f, n) = (self.n_embd as u64, self.n_ff as u64, self.n_experts as u64);
        let tensors = [
            ("before", vec![self.before], TensorType::I8),
            ("gate", vec![e, f, n], self.types[0]),
            ("up", vec![e, f, n], self.types[1]),
            ("down", vec![f, e, n], self.types[2]),
        ];
        let path = match self.split {
            true => {
                let (one, two) = tensors.split_at(2);
                write(dir, "m-00002-of-00002.gguf", self.alignment, Some(1), two);
                write(dir, "m-00001-of-00002.gguf", self.alignment, Some(0), one)
            }
            false => write(dir, "m.gguf", self.alignment, None, &tensors),
        };
        let file = Gguf::open(path).unwrap();
        let [gate, up, down] = ["gate", "up", "down"].map(|name| file.tensor_index(name).unwrap());
        // Without a gate, its tensor is never read.
        let gate = self.is_gated.then_some(gate);
        (file, self.layer(ExpertTensors::Stacked { gate, up, down }))
    }

    /// A granule-major layer of other bytes, with `spare` bytes after each expert.
    fn write_granule_major(&self, dir: &Path, spare: usize) -> (Gguf, LayerExperts) {
        let layer = self.layer(ExpertTensors::GranuleMajor { tensor: 1 });
        let stride = (layer.expert_stride() + spare).next_multiple_of(DIRECT_ALIGN);
        let tensors = [
            ("before", vec![self.before], TensorType::I8),
            ("granules", vec![stride as u64, self.n_experts as u64], TensorType::I8),
        ];
        let path = write(dir, "g.gguf", DIRECT_ALIGN as u32, None, &tensors);
        (Gguf::open(path).unwrap(), layer)
    }
}

/// Writes tensors of bytes that tell positions apart, and cuts off the padding at the end.
fn write(
    dir: &Path,
    name: &str,
    alignment: u32,
    no: Option<u32>,
    tensors: &[(&str, Vec<u64>, TensorType)],
) -> PathBuf {
    let path = dir.join(name);
    let mut writer = Writer::create(&path, Some(alignment)).unwrap();
    if let Some(no) = no {
        writer.set("split.no", no).unwrap();
        writer.set("split.count", 2u32).unwrap();
        writer.set("split.tensors.count", 4u32).unwrap();
    }
    for (name, dims, ty) in tensors {
        writer.declare(name, dims, *ty).unwrap();
    }
    let mut x = 1u64;
    for (name, ..) in tensors {
        let n = writer.tensors().iter().find(|t| t.name == *name).unwrap().n_bytes;
        let mut noise = || {
            x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (x >> 56) as u8
        };
        let bytes: Vec<u8> = (0..n).map(|_| noise()).collect();
        writer.write_tensor(name, &bytes).unwrap();
    }
    let last = writer.tensors().last().unwrap().n_bytes;
    writer.finish().unwrap();
    let padding = last.next_multiple_of(alignment.into()) - last;
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(file.metadata().unwrap().len() - padding).unwrap();
    path
}

/// A slot whose every byte is known to be unset.
fn fresh(layout: &SlotLayout) -> Vec<u8> {
    vec![0xAA; layout.slot_bytes()]
}

/// The bytes of a direct read: all it can read before the end of the file.
fn read(file: &Gguf, piece: &Piece) -> Vec<u8> {
    let mut bytes = vec![0xBB; piece.len];
    let mut n = 0;
    while n < bytes.len() {
        match file.shards()[piece.shard].file().read_at(&mut bytes[n..], piece.start + n as u64) {
            Ok(0) => break,
            got => n += got.unwrap(),
        }
    }
    assert!(n >= piece.need, "{piece:?} beyond the end of the file");
    // What is not promised must not matter.
    bytes[piece.need..].fill(0xCC);
    bytes
}

fn check_form(layout: &SlotLayout, piece: &Piece, granules: &Range<usize>) {
    assert!(piece.start.is_multiple_of(DIRECT_ALIGN as u64), "{piece:?}");
    assert!(piece.len.is_multiple_of(DIRECT_ALIGN) && piece.need <= piece.len, "{piece:?}");
    assert!(piece.need > piece.len - DIRECT_ALIGN, "{piece:?} reads a page in vain");
    match piece.to {
        Dest::Slot { granule, at } => {
            assert!(granules.contains(&granule) && at.is_multiple_of(DIRECT_ALIGN), "{piece:?}");
            assert!(at + piece.len <= layout.slot_bytes(), "{piece:?}");
            assert!(piece.len <= READ_BYTES, "{piece:?}");
        }
        Dest::Rows { n, skip, .. } => {
            let row_bytes = layout.layer.down.row_bytes;
            assert!(piece.len <= layout.staging_bytes(), "{piece:?}");
            assert_eq!(piece.need, skip + n * row_bytes);
            assert!(piece.len <= READ_BYTES || n == 1, "{piece:?}");
        }
    }
}

/// Slots of a run of granules after all reads of it, in an order that a link might end them.
fn load(file: &Gguf, layout: &SlotLayout, expert: u32, granules: Range<usize>) -> Vec<Vec<u8>> {
    let mut pieces = Vec::new();
    layout.pieces(expert, granules.clone(), &mut pieces);
    let mut slots: Vec<Vec<u8>> = granules.clone().map(|_| fresh(layout)).collect();
    for piece in pieces.iter().rev() {
        check_form(layout, piece, &granules);
        let bytes = read(file, piece);
        match piece.to {
            Dest::Slot { granule, at } => {
                slots[granule - granules.start][at..][..piece.len].copy_from_slice(&bytes);
            }
            Dest::Rows { .. } => {
                let bases: Vec<*mut u8> = slots.iter_mut().map(|slot| slot.as_mut_ptr()).collect();
                // SAFETY: the slots are separate vectors of `slot_bytes()` each, all ours.
                unsafe { layout.scatter(piece, &bytes[..piece.need], granules.clone(), &bases) };
            }
        }
    }
    slots
}

fn rows(bytes: &[u8], stride: usize, n: usize, width: usize) -> Vec<&[u8]> {
    (0..n).map(|row| &bytes[row * stride..][..width]).collect()
}

/// Asserts that the weights are equal, wherever and however far apart the rows are.
fn assert_same(layer: &LayerExperts, a: &ReadyGranule<'_>, b: &ReadyGranule<'_>) {
    assert_eq!((a.expert, a.index, &a.rows), (b.expert, b.index, &b.rows));
    let n = a.rows.len();
    let (gate, up) = (layer.gate.row_bytes, layer.up.row_bytes);
    let width = layer.down.columns(&a.rows).len();
    assert!(rows(a.gate, a.gate_stride, n, gate) == rows(b.gate, b.gate_stride, n, gate), "gate");
    assert!(rows(a.up, a.up_stride, n, up) == rows(b.up, b.up_stride, n, up), "up");
    let n = layer.down.rows;
    let (of_a, of_b) =
        (rows(a.down, a.down_stride, n, width), rows(b.down, b.down_stride, n, width));
    assert!(of_a == of_b, "down");
}

/// Every run of granules of every expert, and the sums of sizes.
fn check_all_runs(file: &Gguf, layer: &LayerExperts) {
    let layout = SlotLayout::new(file, layer);
    assert!(layout.slot_bytes().is_multiple_of(DIRECT_ALIGN));
    let n = layer.geometry.n_granules();
    let sum: usize = (0..n).map(|index| layer.granule_bytes(index)).sum();
    assert_eq!(sum, layer.expert_bytes());
    for expert in 0..layer.n_experts as u32 {
        for start in 0..n {
            for end in start + 1..=n {
                let slots = load(file, &layout, expert, start..end);
                for (index, slot) in (start..end).zip(&slots) {
                    let landed = layout.view(slot, expert, index);
                    assert_same(layer, &landed, &layer.in_place(file, expert, index));
                }
            }
        }
    }
}

fn shapes() -> impl Strategy<Value = Shape> {
    let types = || select(vec![F32, F16, Q8_0, Q4_0, Q4_K, Q6_K]);
    let narrow = select(vec![F32, F16, Q8_0, Q4_0]);
    let down = prop_oneof![
        narrow.prop_map(|ty| (ty, 32)),
        select(vec![Q4_K, Q6_K]).prop_map(|ty| (ty, 256))
    ];
    let counts = (1usize..=7, 1usize..=7, 1usize..=4);
    let file = (select(vec![8u32, 32, 64, 4096]), 1u64..9000, any::<bool>(), any::<bool>());
    (types(), types(), down, 1usize..=3, counts, file).prop_map(
        |(gate, up, (down, block), width, (blocks, blocks_a_granule, n_experts), file)| Shape {
            types: [gate, up, down],
            is_gated: file.3,
            n_embd: width * gate.block_len().max(up.block_len()),
            n_ff: blocks * block,
            granule_rows: (blocks_a_granule * block).min(blocks * block),
            n_experts,
            alignment: file.0,
            before: file.1,
            split: file.2,
        },
    )
}

fn config() -> ProptestConfig {
    ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn slots_hold_what_the_file_holds(shape in shapes()) {
        let dir = tempfile::tempdir().unwrap();
        let (file, layer) = shape.write_stacked(dir.path());
        check_all_runs(&file, &layer);
    }

    #[test]
    fn granule_major_slots_too(shape in shapes(), spare in select(vec![0usize, 1, 5000])) {
        let dir = tempfile::tempdir().unwrap();
        let (file, layer) = shape.write_granule_major(dir.path(), spare);
        check_all_runs(&file, &layer);
        prop_assert_eq!(SlotLayout::new(&file, &layer).staging_bytes(), 0);
    }
}

fn check_both(shape: &Shape) {
    let dir = tempfile::tempdir().unwrap();
    let (file, layer) = shape.write_stacked(dir.path());
    check_all_runs(&file, &layer);
    let (file, layer) = shape.write_granule_major(dir.path(), 0);
    check_all_runs(&file, &layer);
}

fn odd(types: [TensorType; 3], n_embd: usize, n_ff: usize, granule_rows: usize) -> Shape {
    Shape {
        types,
        is_gated: true,
        n_embd,
        n_ff,
        granule_rows,
        n_experts: 2,
        alignment: 32,
        before: 33,
        split: false,
    }
}

#[test]
fn an_intermediate_size_that_is_no_multiple_of_256() {
    check_both(&odd([Q4_K, Q4_K, Q8_0], 256, 1408, 512));
}

#[test]
fn matrices_of_many_reads() {
    let shape = odd([F32, F16, F32], 4096, 96, 64);
    check_both(&shape);
    let dir = tempfile::tempdir().unwrap();
    let (file, layer) = shape.write_stacked(dir.path());
    let mut pieces = Vec::new();
    SlotLayout::new(&file, &layer).pieces(1, 0..shape.n_granules(), &mut pieces);
    // Gate 1 MiB and 512 KiB, up 512 and 256 KiB, off page boundaries; 1.5 MiB of down.
    assert_eq!(pieces.len(), (3 + 2) + (2 + 1) + 4);
    let bytes: usize = pieces.iter().map(|piece| piece.need).sum();
    assert!(bytes < layer.expert_bytes() + pieces.len() * DIRECT_ALIGN);
}

#[test]
fn experts_without_a_gate_read_two_matrices() {
    let shape = Shape { is_gated: false, ..odd([F32, F16, F32], 4096, 96, 64) };
    check_both(&shape);
    let dir = tempfile::tempdir().unwrap();
    let (file, layer) = shape.write_stacked(dir.path());
    assert_eq!(layer.expert_bytes(), 96 * 4096 * (2 + 4));
    let mut pieces = Vec::new();
    SlotLayout::new(&file, &layer).pieces(1, 0..shape.n_granules(), &mut pieces);
    assert_eq!(pieces.len(), (2 + 1) + 4);
    let bytes: usize = pieces.iter().map(|piece| piece.need).sum();
    assert!(bytes < layer.expert_bytes() + pieces.len() * DIRECT_ALIGN);
}

#[test]
fn a_row_of_down_that_is_longer_than_a_read() {
    check_both(&odd([F16, F16, F16], 2, 300_000, 100_000));
}

#[test]
fn an_expert_of_one_sequential_read_in_granule_major_files() {
    let shape = odd([Q4_K, Q4_K, Q4_K], 512, 1024, 256);
    let dir = tempfile::tempdir().unwrap();
    let (file, layer) = shape.write_granule_major(dir.path(), 0);
    let mut pieces = Vec::new();
    SlotLayout::new(&file, &layer).pieces(1, 1..shape.n_granules(), &mut pieces);
    for (a, b) in pieces.iter().zip(&pieces[1..]) {
        assert_eq!(a.start + a.len as u64, b.start);
    }
}

#[test]
fn no_granules_need_no_reads() {
    let dir = tempfile::tempdir().unwrap();
    let (file, layer) = odd([F32, F32, F32], 32, 64, 32).write_stacked(dir.path());
    let mut pieces = Vec::new();
    SlotLayout::new(&file, &layer).pieces(0, 2..2, &mut pieces);
    assert!(pieces.is_empty());
}
