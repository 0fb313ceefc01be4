//! Writes a trace while it is recorded.

use super::block::{Block, Codec, checksum};
use super::bytes::Fault;
use super::{Header, MAGIC, VERSION};
use crate::policy::Phase;
use std::collections::HashSet;
use std::io::{self, Write};
use std::ops::Range;

/// A block is written when its columns have this many bytes, or its request ends.
const BLOCK_BYTES: usize = 1 << 20;

/// Call its methods in the order of the engine's events: `begin_request`; for each forward pass
/// `begin_pass`; for each MoE layer `routed` and, in decode steps, the optional values that the
/// header announces. Panics on any other order or missing values, which would be read as zeros.
pub struct Writer<W: Write> {
    out: W,
    header: Header,
    codec: Codec,
    block: Block,
    /// Tokens whose embeddings are written.
    known: HashSet<u32>,
    pass: OpenPass,
    in_request: bool,
    n_requests: u64,
    n_tokens: u64,
}

/// The forward pass that is under way.
#[derive(Default)]
struct OpenPass {
    /// Its rows in the block's columns, and in those of decode steps only.
    rows: Range<usize>,
    decode_rows: Range<usize>,
    /// Values that are still to come.
    missing: usize,
}

impl<W: Write> Writer<W> {
    /// Refuses a header that the format has no room for.
    pub fn new(mut out: W, header: Header) -> io::Result<Writer<W>> {
        let refused = |fault: Fault| {
            let sentence = format!("expected {}, got {}", fault.expected, fault.got);
            io::Error::new(io::ErrorKind::InvalidInput, sentence)
        };
        let bytes = header.encode().map_err(refused)?;
        let mut start = MAGIC.to_vec();
        start.extend(VERSION.to_le_bytes());
        start.extend((bytes.len() as u32).to_le_bytes());
        start.extend(bytes);
        start.extend(checksum([&start]).to_le_bytes());
        out.write_all(&start)?;
        Ok(Writer {
            out,
            codec: Codec::new(&header),
            header,
            block: Block::default(),
            known: HashSet::new(),
            pass: OpenPass::default(),
            in_request: false,
            n_requests: 0,
            n_tokens: 0,
        })
    }

    pub fn header(&self) -> &Header {
        &self.header
    }

    /// `kind`: the kind of text.
    pub fn begin_request(&mut self, kind: &str) -> io::Result<()> {
        self.flush()?;
        self.in_request = true;
        self.n_requests += 1;
        self.block.begins = Some(kind.to_string());
        Ok(())
    }

    /// `embeddings`: [tokens, n_embd]. A request's prompt comes before its decode steps.
    pub fn begin_pass(&mut self, phase: Phase, ids: &[u32], embeddings: &[f32]) -> io::Result<()> {
        assert!(self.in_request, "a pass outside a request");
        assert_eq!(embeddings.len(), ids.len() * self.header.n_embd);
        self.end_pass();
        if self.block_bytes() >= BLOCK_BYTES {
            self.flush()?;
        }
        for (&id, embedding) in ids.iter().zip(rows_of(embeddings, self.header.n_embd, ids.len())) {
            self.embed(id, embedding);
        }
        let (block, n) = (&mut self.block, ids.len());
        let (row, precision) = (self.codec.layout.row, self.header.precision);
        block.columns.ids.extend_from_slice(ids);
        self.n_tokens += n as u64;
        let (first, first_decode) = (block.n_prompt + block.n_decode, block.n_decode);
        let n_decode = match phase {
            Phase::Prompt => {
                assert_eq!(block.n_decode, 0, "a prompt after its decode");
                block.n_prompt += n;
                0
            }
            Phase::Decode => {
                block.n_decode += n;
                n
            }
        };
        let columns = &mut block.columns;
        columns.chosen.resize(columns.ids.len() * row.chosen, 0);
        columns.probs.resize(columns.ids.len() * row.probs * precision.prob_bytes(), 0);
        columns.ahead.resize(block.n_decode * row.ahead * precision.prob_bytes(), 0);
        columns.hidden.resize(block.n_decode * row.hidden * precision.value_bytes(), 0);
        self.pass = OpenPass {
            rows: first..first + n,
            decode_rows: first_decode..first_decode + n_decode,
            missing: n * (row.chosen + row.probs) + n_decode * (row.ahead + row.hidden),
        };
        Ok(())
    }

    fn embed(&mut self, id: u32, embedding: &[f32]) {
        if self.known.insert(id) {
            let bytes = &mut self.block.embeddings;
            let start = bytes.len();
            let (row, width) = self.header.precision.embedding_row(embedding.len());
            bytes.resize(start + row * width, 0);
            self.header.precision.put_embedding(embedding, &mut bytes[start..]);
            self.block.n_new += 1;
        }
    }

    /// `chosen`: [tokens, k], best first; `probs`: [tokens, experts], or none if they are unknown.
    pub fn routed(&mut self, layer: usize, chosen: &[u32], probs: &[f32]) {
        let (part, row) = (&self.codec.layout.layers[layer], self.codec.layout.row);
        let (columns, n) = (&mut self.block.columns, self.pass.rows.len());
        assert_eq!(chosen.len(), n * part.chosen.len());
        assert_eq!(probs.len(), n * part.probs.len());
        let precision = self.header.precision;
        for (i, at) in self.pass.rows.clone().enumerate() {
            let chosen = &chosen[i * part.chosen.len()..][..part.chosen.len()];
            columns.chosen[at * row.chosen..][part.chosen.clone()].copy_from_slice(chosen);
            let probs = &probs[i * part.probs.len()..][..part.probs.len()];
            let out = bytes_of(&part.probs, at * row.probs, precision.prob_bytes());
            precision.put_probs(probs, &mut columns.probs[out]);
        }
        self.pass.missing -= n * (part.chosen.len() + part.probs.len());
    }

    /// A later router's view of a decode step's activation in `layer`, as many MoE layers ahead.
    /// One that the trace does not hold is passed over.
    pub fn ahead(&mut self, layer: usize, distance: usize, probs: &[f32]) {
        let part = self.codec.layout.layers[layer].ahead.get(distance - 1);
        let Some(part) = part.filter(|_| !self.pass.decode_rows.is_empty()) else { return };
        assert_eq!(self.pass.decode_rows.len(), 1, "one token a step");
        let precision = self.header.precision;
        let at = self.pass.decode_rows.start * self.codec.layout.row.ahead;
        let out = bytes_of(&part.range, at, precision.prob_bytes());
        precision.put_probs(probs, &mut self.block.columns.ahead[out]);
        self.pass.missing -= part.range.len();
    }

    /// The input of a layer's router in a decode step: `[n_embd]`.
    pub fn hidden(&mut self, layer: usize, hidden: &[f32]) {
        let part = &self.codec.layout.layers[layer].hidden;
        if part.is_empty() || self.pass.decode_rows.is_empty() {
            return;
        }
        assert_eq!(self.pass.decode_rows.len(), 1, "one token a step");
        let precision = self.header.precision;
        let at = self.pass.decode_rows.start * self.codec.layout.row.hidden;
        let out = bytes_of(part, at, precision.value_bytes());
        precision.put_values(hidden, &mut self.block.columns.hidden[out]);
        self.pass.missing -= part.len();
    }

    /// Writes the end marker.
    pub fn finish(mut self) -> io::Result<W> {
        self.flush()?;
        let mut end = 0u32.to_le_bytes().to_vec();
        for n in [self.n_requests, self.n_tokens, self.known.len() as u64] {
            end.extend(n.to_le_bytes());
        }
        end.extend(checksum([&end]).to_le_bytes());
        self.out.write_all(&end)?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn end_pass(&self) {
        assert_eq!(self.pass.missing, 0, "values of the last pass are missing");
    }

    fn block_bytes(&self) -> usize {
        let Block { embeddings, columns, .. } = &self.block;
        let n_ids = columns.ids.len() + columns.chosen.len();
        embeddings.len() + columns.probs.len() + columns.ahead.len() + columns.hidden.len() + n_ids
    }

    fn flush(&mut self) -> io::Result<()> {
        self.end_pass();
        self.pass = OpenPass::default();
        if self.block == Block::default() {
            return Ok(());
        }
        self.out.write_all(&self.codec.encode(&std::mem::take(&mut self.block)))
    }
}

/// `n` rows, which may be empty.
fn rows_of(values: &[f32], width: usize, n: usize) -> impl Iterator<Item = &[f32]> {
    (0..n).map(move |i| &values[i * width..][..width])
}

/// The bytes of some values of a row that begins at value `row`.
fn bytes_of(range: &Range<usize>, row: usize, width: usize) -> Range<usize> {
    (row + range.start) * width..(row + range.end) * width
}
