//! A trace in memory, values as they were stored; they become numbers when they are asked for.

use super::block::{Block, Codec, Columns, checksum};
use super::bytes::{Bytes, Fault};
use super::{Header, MAGIC, VERSION};
use crate::policy::Phase;
use crate::{Error, Result};
use std::collections::HashMap;
use std::fs;
use std::ops::Range;
use std::path::Path;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The kind of text.
    pub kind: String,
    /// Its prompt and then its decode steps.
    pub tokens: Range<usize>,
    pub n_prompt: usize,
}

/// Positions of a token's values.
#[derive(Clone, Copy, Debug)]
struct TokenRows {
    embedding: usize,
    /// Row of the columns that only decode steps have.
    decode_row: Option<usize>,
}

#[derive(Debug)]
pub struct Trace {
    header: Header,
    codec: Codec,
    requests: Vec<Request>,
    rows: Vec<TokenRows>,
    columns: Columns,
    /// [distinct tokens, n_embd]
    embeddings: Vec<f32>,
}

impl Trace {
    /// Reads and checks a whole file.
    pub fn open(path: &Path) -> Result<Trace> {
        let bytes = fs::read(path).map_err(|e| Error::io(path, e))?;
        Trace::decode(&bytes, path)
    }

    /// `path`: whose bytes these are.
    pub fn decode(bytes: &[u8], path: &Path) -> Result<Trace> {
        read(bytes).map_err(|fault| Error::format(path, fault.place, fault.expected, fault.got))
    }

    pub fn header(&self) -> &Header {
        &self.header
    }

    pub fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// Tokens of all requests are numbered through.
    pub fn n_tokens(&self) -> usize {
        self.rows.len()
    }

    pub fn phase(&self, token: usize) -> Phase {
        match self.rows[token].decode_row {
            Some(_) => Phase::Decode,
            None => Phase::Prompt,
        }
    }

    pub fn token_id(&self, token: usize) -> u32 {
        self.columns.ids[token]
    }

    /// The token's row of the embedding table: `[n_embd]`.
    pub fn embedding(&self, token: usize) -> &[f32] {
        &self.embeddings[self.rows[token].embedding * self.header.n_embd..][..self.header.n_embd]
    }

    /// Best first; none in a dense layer.
    pub fn chosen(&self, token: usize, layer: usize) -> &[u32] {
        let row = &self.columns.chosen[token * self.codec.layout.row.chosen..];
        &row[self.codec.layout.layers[layer].chosen.clone()]
    }

    /// Replaces the contents of `out` by the probabilities of all experts; none in a dense layer,
    /// or if they are unknown.
    pub fn probs(&self, token: usize, layer: usize, out: &mut Vec<f32>) {
        let (precision, row) = (self.header.precision, self.codec.layout.row.probs);
        let range = &self.codec.layout.layers[layer].probs;
        let bytes = part(&self.columns.probs, token * row, range, precision.prob_bytes());
        precision.get_probs(bytes, out);
    }

    /// Replaces the contents of `out` by what the router `distance` MoE layers ahead makes of this
    /// layer's activation, and says which layer that is. `None` if it is not in the trace.
    pub fn ahead(
        &self,
        token: usize,
        layer: usize,
        distance: usize,
        out: &mut Vec<f32>,
    ) -> Option<usize> {
        out.clear();
        let decode_row = self.rows[token].decode_row?;
        let found = self.codec.layout.layers[layer].ahead.get(distance.checked_sub(1)?)?;
        let (precision, row) = (self.header.precision, self.codec.layout.row.ahead);
        let at = decode_row * row;
        let bytes = part(&self.columns.ahead, at, &found.range, precision.prob_bytes());
        precision.get_probs(bytes, out);
        Some(found.target)
    }

    /// Replaces the contents of `out` by what the layer's router saw: `[n_embd]`, or nothing if it
    /// is not in the trace.
    pub fn hidden(&self, token: usize, layer: usize, out: &mut Vec<f32>) {
        out.clear();
        let Some(decode_row) = self.rows[token].decode_row else { return };
        let (precision, row) = (self.header.precision, self.codec.layout.row.hidden);
        let range = &self.codec.layout.layers[layer].hidden;
        let at = decode_row * row;
        let bytes = part(&self.columns.hidden, at, range, precision.value_bytes());
        precision.extend_values(bytes, out);
    }
}

/// A trace while its blocks are read.
struct Reader {
    trace: Trace,
    /// Token ids, and which embedding they have.
    dictionary: HashMap<u32, usize>,
    n_decode: usize,
}

impl Reader {
    fn new(header: Header) -> Reader {
        let trace = Trace {
            codec: Codec::new(&header),
            header,
            requests: Vec::new(),
            rows: Vec::new(),
            columns: Columns::default(),
            embeddings: Vec::new(),
        };
        Reader { trace, dictionary: HashMap::new(), n_decode: 0 }
    }

    fn append(&mut self, block: Block) -> std::result::Result<(), Fault> {
        let trace = &mut self.trace;
        let first = trace.rows.len();
        let fault = |expected: &str, got: &str| Fault::new(format!("token {first}"), expected, got);
        if let Some(kind) = block.begins {
            trace.requests.push(Request { kind, tokens: first..first, n_prompt: 0 });
        }
        let Some(request) = trace.requests.last_mut() else {
            return Err(fault("the beginning of a request", "its rest"));
        };
        if block.n_prompt > 0 && request.tokens.len() > request.n_prompt {
            return Err(fault("a decode step", "a prompt after it"));
        }
        request.n_prompt += block.n_prompt;
        request.tokens.end += block.n_prompt + block.n_decode;
        let n_known = self.dictionary.len();
        for (i, &id) in block.columns.ids.iter().enumerate() {
            let next = self.dictionary.len();
            let embedding = *self.dictionary.entry(id).or_insert(next);
            let decode_row = i.checked_sub(block.n_prompt).map(|i| self.n_decode + i);
            trace.rows.push(TokenRows { embedding, decode_row });
        }
        if self.dictionary.len() - n_known != block.n_new {
            return Err(fault("an embedding for each new token", &block.n_new.to_string()));
        }
        self.n_decode += block.n_decode;
        let (precision, n_embd) = (trace.header.precision, trace.header.n_embd);
        precision.extend_embeddings(&block.embeddings, n_embd, &mut trace.embeddings);
        trace.columns.append(block.columns);
        Ok(())
    }

    /// The end marker, behind its zero.
    fn end(&self, file: &mut Bytes<'_>) -> std::result::Result<(), Fault> {
        let counts = file.take(24, "counts at the end")?;
        if file.u32("checksum of the end")? != checksum([&[0; 4], counts]) {
            return Err(file.fault(32, "an end as written", "another checksum"));
        }
        let trace = &self.trace;
        let read = [trace.requests.len(), trace.rows.len(), self.dictionary.len()];
        let names = ["requests", "tokens", "distinct tokens"];
        for ((count, n), name) in counts.chunks_exact(8).zip(read).zip(names) {
            let count = u64::from_le_bytes(count.try_into().expect("eight bytes"));
            if count != n as u64 {
                return Err(file.fault(28, format!("{count} {name} before the end"), n));
            }
        }
        file.end()
    }
}

fn read(bytes: &[u8]) -> std::result::Result<Trace, Fault> {
    let mut file = Bytes::new("", bytes);
    let mut reader = Reader::new(header(bytes, &mut file)?);
    for number in 0.. {
        match file.u32("a block or the end marker")? as usize {
            0 => break,
            n_packed => reader.append(reader.trace.codec.decode(n_packed, &mut file, number)?)?,
        }
    }
    reader.end(&mut file)?;
    Ok(reader.trace)
}

fn header(bytes: &[u8], file: &mut Bytes<'_>) -> std::result::Result<Header, Fault> {
    if file.take(MAGIC.len(), "the first bytes of a trace")? != MAGIC {
        return Err(file.fault(MAGIC.len(), "a routing trace of moeba", "something else"));
    }
    let version = file.u32("version")?;
    if version != VERSION {
        return Err(file.fault(4, format!("version {VERSION}"), version));
    }
    let n = file.u32("length of the header")? as usize;
    let header = file.take(n, "the header")?;
    let covered = &bytes[..file.at()];
    if file.u32("checksum of the header")? != checksum([covered]) {
        return Err(file.fault(4, "a header as written", "another checksum"));
    }
    Header::decode(header)
}

/// The bytes of some values of a row that begins at value `row`.
fn part<'a>(column: &'a [u8], row: usize, range: &Range<usize>, width: usize) -> &'a [u8] {
    &column[(row + range.start) * width..(row + range.end) * width]
}
