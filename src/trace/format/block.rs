//! Blocks: runs of tokens of one request, compressed. Contents, values of one kind together:
//!
//! | field | type |
//! |---|---|
//! | whether a request begins | u8, 0 or 1; if 1, its kind: u16 length, UTF-8 |
//! | prompt tokens, decode tokens | u32, u32; prompt tokens come first |
//! | token ids | u32 \[tokens\] |
//! | tokens not met before | u32; their embeddings \[tokens, n_embd\] in order of first use |
//! | chosen experts | u8, or u16 if a layer has more than 256, \[layers\]\[tokens, k\] |
//! | probabilities | \[layers\]\[tokens, experts\] |
//! | ahead | \[layers\]\[decode tokens, experts of the targets in order of distance\] |
//! | hidden | \[layers\]\[decode tokens, n_embd\] |
//!
//! `[layers][…]` is one array after the other, MoE layers only. In every array the first bytes of
//! all values come first, then the second bytes: that compresses best.

use super::bytes::{Bytes, Fault, put_string};
use super::layout::{LayerPart, Layout};
use super::{Header, Precision};
use flate2::Compression;
use flate2::read::DeflateDecoder;
use flate2::write::DeflateEncoder;
use std::io::{Read, Write};
use std::ops::Range;

/// DEFLATE makes 1032 bytes of one at the most.
const MAX_RATIO: usize = 1032;

/// Both lengths and the CRC.
pub const HEAD_BYTES: usize = 12;

/// Tokens next to each other, a column for each kind of value; rows as `Layout` says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Columns {
    pub ids: Vec<u32>,
    /// [tokens, row.chosen]
    pub chosen: Vec<u32>,
    /// [tokens, row.probs]
    pub probs: Vec<u8>,
    /// [decode tokens, row.ahead]
    pub ahead: Vec<u8>,
    /// [decode tokens, row.hidden]
    pub hidden: Vec<u8>,
}

impl Columns {
    pub fn append(&mut self, mut other: Columns) {
        self.ids.append(&mut other.ids);
        self.chosen.append(&mut other.chosen);
        self.probs.append(&mut other.probs);
        self.ahead.append(&mut other.ahead);
        self.hidden.append(&mut other.hidden);
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Block {
    /// The kind of the request that begins here.
    pub begins: Option<String>,
    /// The number of `columns.ids` that belong to the prompt.
    pub n_prompt: usize,
    pub n_decode: usize,
    pub n_new: usize,
    /// [n_new], rows as `Precision::embedding_row` says
    pub embeddings: Vec<u8>,
    pub columns: Columns,
}

/// How blocks of a trace are laid out.
#[derive(Clone, Debug)]
pub struct Codec {
    precision: Precision,
    n_embd: usize,
    /// Bytes of an expert's id.
    id_bytes: usize,
    n_experts: Vec<usize>,
    pub layout: Layout,
}

impl Codec {
    pub fn new(header: &Header) -> Codec {
        let n_experts: Vec<usize> = header.layers.iter().map(|l| l.n_experts).collect();
        Codec {
            precision: header.precision,
            n_embd: header.n_embd,
            id_bytes: if n_experts.iter().all(|n| *n <= 256) { 1 } else { 2 },
            n_experts,
            layout: Layout::new(header),
        }
    }

    fn parts(&self, of: impl Fn(&LayerPart) -> Range<usize>) -> Vec<Range<usize>> {
        self.layout.layers.iter().map(of).collect()
    }

    /// Head and compressed contents.
    pub fn encode(&self, block: &Block) -> Vec<u8> {
        packed(&self.contents(block))
    }

    fn contents(&self, block: &Block) -> Vec<u8> {
        let columns = &block.columns;
        let mut out = vec![block.begins.is_some().into()];
        if let Some(kind) = &block.begins {
            put_string(kind, &mut out);
        }
        out.extend((block.n_prompt as u32).to_le_bytes());
        out.extend((block.n_decode as u32).to_le_bytes());
        let ids: Vec<u8> = columns.ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        put_column(&ids, 1, 4, &[0..1], &mut out);
        out.extend((block.n_new as u32).to_le_bytes());
        let row = &self.layout.row;
        let values = self.precision.value_bytes();
        let (embedding, width) = self.precision.embedding_row(self.n_embd);
        put_column(&block.embeddings, embedding, width, &[0..embedding], &mut out);
        let chosen =
            columns.chosen.iter().flat_map(|id| id.to_le_bytes().into_iter().take(self.id_bytes));
        let chosen: Vec<u8> = chosen.collect();
        let parts = self.parts(|part| part.chosen.clone());
        put_column(&chosen, row.chosen, self.id_bytes, &parts, &mut out);
        let probs = self.precision.prob_bytes();
        put_column(&columns.probs, row.probs, probs, &self.parts(|p| p.probs.clone()), &mut out);
        put_column(&columns.ahead, row.ahead, probs, &self.parts(LayerPart::all_ahead), &mut out);
        put_column(
            &columns.hidden,
            row.hidden,
            values,
            &self.parts(|p| p.hidden.clone()),
            &mut out,
        );
        out
    }

    /// The block whose head has been read from `file`.
    pub fn decode(
        &self,
        n_packed: usize,
        file: &mut Bytes<'_>,
        number: usize,
    ) -> Result<Block, Fault> {
        let n_raw = file.u32("length of a block")? as usize;
        let crc = file.u32("checksum of a block")?;
        let packed = file.take(n_packed, "a block")?;
        let head = [(n_packed as u32).to_le_bytes(), (n_raw as u32).to_le_bytes()].concat();
        if checksum([&head, packed]) != crc {
            return Err(file.fault(
                n_packed + HEAD_BYTES,
                format!("block {number} as written"),
                "another checksum",
            ));
        }
        let place = file.fault(n_packed, "", "").place;
        if n_raw / MAX_RATIO > n_packed {
            return Err(Fault::new(
                place,
                format!("{n_raw} bytes compressed"),
                format!("only {n_packed}"),
            ));
        }
        let mut raw = Vec::with_capacity(n_raw);
        let unpacked = DeflateDecoder::new(packed).take(n_raw as u64 + 1).read_to_end(&mut raw);
        match unpacked {
            Ok(n) if n == n_raw => self.block(Bytes::new(format!("block {number}, "), &raw)),
            Ok(n) => Err(Fault::new(place, format!("{n_raw} bytes compressed"), n)),
            Err(e) => Err(Fault::new(place, "compressed bytes", e)),
        }
    }

    fn block(&self, mut rest: Bytes<'_>) -> Result<Block, Fault> {
        let begins = match rest.u8("beginning of a request")? {
            0 => None,
            1 => Some(rest.string("kind of a request")?.to_string()),
            byte => return Err(rest.fault(1, "0 or 1", byte)),
        };
        let n_prompt = rest.count(rest.len(), "prompt tokens")?;
        let n_decode = rest.count(rest.len(), "decode tokens")?;
        let n = n_prompt + n_decode;
        let ids = take_column(&mut rest, n, 1, 4, &[0..1], "token ids")?;
        let ids = ids.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().expect("4 bytes")));
        let ids = ids.collect();
        let n_new = rest.count(n, "new tokens")?;
        let row = &self.layout.row;
        let (values, probs) = (self.precision.value_bytes(), self.precision.prob_bytes());
        let (embedding, width) = self.precision.embedding_row(self.n_embd);
        let parts = [0..embedding];
        let embeddings = take_column(&mut rest, n_new, embedding, width, &parts, "embeddings")?;
        let parts = self.parts(|part| part.chosen.clone());
        let chosen =
            take_column(&mut rest, n, row.chosen, self.id_bytes, &parts, "chosen experts")?;
        let parts = self.parts(|part| part.probs.clone());
        let probs_column = take_column(&mut rest, n, row.probs, probs, &parts, "probabilities")?;
        let parts = self.parts(LayerPart::all_ahead);
        let ahead =
            take_column(&mut rest, n_decode, row.ahead, probs, &parts, "probabilities ahead")?;
        let parts = self.parts(|part| part.hidden.clone());
        let hidden = take_column(&mut rest, n_decode, row.hidden, values, &parts, "hidden states")?;
        rest.end()?;
        let chosen = self.checked_ids(&chosen, &rest)?;
        let finite = self.precision.probs_are_sound(&probs_column)
            && self.precision.probs_are_sound(&ahead)
            && self.precision.embeddings_are_finite(&embeddings, self.n_embd)
            && self.precision.values_are_finite(&hidden);
        if !finite {
            return Err(rest.fault(rest.at(), "finite values and probabilities", "others"));
        }
        let columns = Columns { ids, chosen, probs: probs_column, ahead, hidden };
        Ok(Block { begins, n_prompt, n_decode, n_new, embeddings, columns })
    }

    /// Ids of experts that exist, each once a layer and token.
    fn checked_ids(&self, bytes: &[u8], block: &Bytes<'_>) -> Result<Vec<u32>, Fault> {
        let id = |b: &[u8]| b.iter().rev().fold(0, |id, byte| id << 8 | u32::from(*byte));
        let ids: Vec<u32> = bytes.chunks_exact(self.id_bytes).map(id).collect();
        let mut sorted = Vec::new();
        for row in ids.chunks_exact(self.layout.row.chosen.max(1)) {
            for (part, &n) in self.layout.layers.iter().zip(&self.n_experts) {
                sorted.clear();
                sorted.extend_from_slice(&row[part.chosen.clone()]);
                sorted.sort_unstable();
                let twice = sorted.windows(2).any(|pair| pair[0] == pair[1]);
                if twice || sorted.last().is_some_and(|id| *id as usize >= n) {
                    let expected = format!("distinct experts of {n}");
                    return Err(block.fault(block.at(), expected, format!("{sorted:?}")));
                }
            }
        }
        Ok(ids)
    }
}

impl LayerPart {
    /// All distances together.
    fn all_ahead(&self) -> Range<usize> {
        match (self.ahead.first(), self.ahead.last()) {
            (Some(first), Some(last)) => first.range.start..last.range.end,
            _ => 0..0,
        }
    }
}

/// The head and the compressed form of a block's contents.
pub fn packed(raw: &[u8]) -> Vec<u8> {
    let mut encoder = DeflateEncoder::new(Vec::new(), Compression::best());
    let packed = encoder.write_all(raw).and_then(|()| encoder.finish());
    let packed = packed.expect("writing to memory does not fail");
    let mut out = (packed.len() as u32).to_le_bytes().to_vec();
    out.extend((raw.len() as u32).to_le_bytes());
    out.extend(checksum([&out, &packed]).to_le_bytes());
    out.extend(packed);
    out
}

pub fn checksum<const N: usize>(parts: [&[u8]; N]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    parts.iter().for_each(|part| hasher.update(part));
    hasher.finalize()
}

/// Writes rows of `row` values of `width` bytes part by part and byte by byte of the values.
fn put_column(rows: &[u8], row: usize, width: usize, parts: &[Range<usize>], out: &mut Vec<u8>) {
    let rows = || rows.chunks_exact((row * width).max(1));
    for part in parts {
        for byte in 0..width {
            for row in rows() {
                out.extend(part.clone().map(|value| row[value * width + byte]));
            }
        }
    }
}

/// Reads `n` rows that `put_column` wrote.
fn take_column(
    from: &mut Bytes<'_>,
    n: usize,
    row: usize,
    width: usize,
    parts: &[Range<usize>],
    name: &str,
) -> Result<Vec<u8>, Fault> {
    let row_bytes = row * width;
    let bytes = from.many(n, row_bytes, name)?;
    let mut out = vec![0; bytes.len()];
    let mut bytes = bytes.iter();
    for part in parts {
        for byte in 0..width {
            for row in out.chunks_exact_mut(row_bytes.max(1)) {
                for (value, from) in part.clone().zip(&mut bytes) {
                    row[value * width + byte] = *from;
                }
            }
        }
    }
    Ok(out)
}
