//! Decoder of LZMA, the format of `xz --format=lzma`, in which `kernels/ptx` is embedded: half the
//! size of deflate, which looks back 32 KiB where kernels of one family repeat over a megabyte.

/// Bytes ahead of the stream: parameters, the dictionary's size, and the content's size.
const HEADER: usize = 13;
const ONE: u16 = 1 << 11;
const STATES: usize = 12;
/// Positions within a period, which is at most 16 bytes.
const POSITIONS: usize = 16;

/// The content. None if the stream is broken.
pub fn decompress(file: &[u8]) -> Option<Vec<u8>> {
    let (header, stream) = file.split_at_checked(HEADER)?;
    let size = u64::from_le_bytes(header[5..].try_into().ok()?);
    let size = (size != u64::MAX).then_some(size);
    let mut decoder = Decoder::new(header[0], stream)?;
    while size.is_none_or(|size| (decoder.out.len() as u64) < size) {
        if decoder.step()? == Step::End {
            break;
        }
    }
    let whole = size.is_none_or(|size| decoder.out.len() as u64 == size);
    whole.then_some(decoder.out)
}

/// Binary arithmetic decoding: 32 bits of the stream are compared with a share of a range.
struct Range<'a> {
    rest: &'a [u8],
    range: u32,
    code: u32,
    /// Bytes were missing; they count as zeros until someone looks.
    is_cut: bool,
}

impl<'a> Range<'a> {
    fn new(stream: &'a [u8]) -> Option<Range<'a>> {
        let (first, rest) = stream.split_at_checked(5)?;
        let code = u32::from_be_bytes(first[1..].try_into().ok()?);
        (first[0] == 0).then_some(Range { rest, range: u32::MAX, code, is_cut: false })
    }

    fn refill(&mut self) {
        if self.range < 1 << 24 {
            let (byte, rest) = match self.rest {
                [byte, rest @ ..] => (*byte, rest),
                [] => {
                    self.is_cut = true;
                    (0, self.rest)
                }
            };
            self.rest = rest;
            self.range <<= 8;
            self.code = self.code << 8 | u32::from(byte);
        }
    }

    /// A bit, and what was learned from it.
    fn bit(&mut self, chance: &mut u16) -> usize {
        let bound = (self.range >> 11) * u32::from(*chance);
        let bit = if self.code < bound {
            self.range = bound;
            *chance += (ONE - *chance) >> 5;
            0
        } else {
            self.range -= bound;
            self.code -= bound;
            *chance -= *chance >> 5;
            1
        };
        self.refill();
        bit
    }

    /// Bits that are as often 0 as 1, the highest first.
    fn even_bits(&mut self, n: u32) -> usize {
        let mut value = 0;
        for _ in 0..n {
            self.range >>= 1;
            let bit = self.code >= self.range;
            if bit {
                self.code -= self.range;
            }
            self.refill();
            value = value << 1 | usize::from(bit);
        }
        value
    }

    /// A number of as many bits as the tree is deep, the highest first.
    fn tree(&mut self, chances: &mut [u16]) -> usize {
        let mut at = 1;
        while at < chances.len() {
            at = at << 1 | self.bit(&mut chances[at]);
        }
        at - chances.len()
    }

    /// The same of `n` bits, the lowest first.
    fn reverse_tree(&mut self, chances: &mut [u16], n: u32) -> usize {
        let (mut at, mut value) = (1, 0);
        for i in 0..n {
            let bit = self.bit(&mut chances[at]);
            at = at << 1 | bit;
            value |= bit << i;
        }
        value
    }
}

/// Lengths of copies: 2 to 9, 10 to 17, and 18 to 273.
struct Lengths {
    choice: [u16; 2],
    short: [[u16; 8]; POSITIONS],
    middle: [[u16; 8]; POSITIONS],
    long: [u16; 256],
}

impl Lengths {
    fn new() -> Lengths {
        let chance = ONE / 2;
        Lengths {
            choice: [chance; 2],
            short: [[chance; 8]; POSITIONS],
            middle: [[chance; 8]; POSITIONS],
            long: [chance; 256],
        }
    }

    fn next(&mut self, range: &mut Range, position: usize) -> usize {
        if range.bit(&mut self.choice[0]) == 0 {
            return 2 + range.tree(&mut self.short[position]);
        }
        if range.bit(&mut self.choice[1]) == 0 {
            return 10 + range.tree(&mut self.middle[position]);
        }
        18 + range.tree(&mut self.long)
    }
}

#[derive(PartialEq, Eq)]
enum Step {
    More,
    End,
}

struct Decoder<'a> {
    range: Range<'a>,
    /// Bits of the byte before, and of the position, that choose the chances of a literal.
    before_bits: u32,
    literal_bits: u32,
    position_bits: u32,
    out: Vec<u8>,
    /// Which of literals and copies came last.
    state: usize,
    /// The last four distances.
    last: [usize; 4],
    is_copy: [[u16; POSITIONS]; STATES],
    is_last: [u16; STATES],
    /// The first, second or third of the last distances, each of which has a chance of its own.
    which: [[u16; STATES]; 3],
    is_long: [[u16; POSITIONS]; STATES],
    literals: Vec<u16>,
    copies: Lengths,
    repeats: Lengths,
    slots: [[u16; 64]; 4],
    low: [u16; 128],
    align: [u16; 16],
}

impl<'a> Decoder<'a> {
    fn new(parameters: u8, stream: &'a [u8]) -> Option<Decoder<'a>> {
        let (before_bits, rest) = (u32::from(parameters) % 9, u32::from(parameters) / 9);
        let (literal_bits, position_bits) = (rest % 5, rest / 5);
        if position_bits > 4 {
            return None;
        }
        let chance = ONE / 2;
        Some(Decoder {
            range: Range::new(stream)?,
            before_bits,
            literal_bits,
            position_bits,
            out: Vec::new(),
            state: 0,
            last: [1; 4],
            is_copy: [[chance; POSITIONS]; STATES],
            is_last: [chance; STATES],
            which: [[chance; STATES]; 3],
            is_long: [[chance; POSITIONS]; STATES],
            literals: vec![chance; 0x300 << (before_bits + literal_bits)],
            copies: Lengths::new(),
            repeats: Lengths::new(),
            slots: [[chance; 64]; 4],
            low: [chance; 128],
            align: [chance; 16],
        })
    }

    /// A literal or a copy.
    fn step(&mut self) -> Option<Step> {
        if self.range.is_cut {
            return None;
        }
        let position = self.out.len() & ((1 << self.position_bits) - 1);
        if self.range.bit(&mut self.is_copy[self.state][position]) == 0 {
            self.literal();
            return Some(Step::More);
        }
        let length = if self.range.bit(&mut self.is_last[self.state]) == 0 {
            let length = self.copies.next(&mut self.range, position);
            let distance = self.distance(length)?;
            if distance == 1 << 32 {
                return Some(Step::End);
            }
            self.last.rotate_right(1);
            self.last[0] = distance;
            self.state = if self.state < 7 { 7 } else { 10 };
            length
        } else if self.choose_last(position) {
            self.state = if self.state < 7 { 9 } else { 11 };
            1
        } else {
            self.state = if self.state < 7 { 8 } else { 11 };
            self.repeats.next(&mut self.range, position)
        };
        let from = self.out.len().checked_sub(self.last[0])?;
        for at in from..from + length {
            self.out.push(self.out[at]);
        }
        Some(Step::More)
    }

    /// Moves the chosen one of the last distances to the front; true if one byte is copied.
    fn choose_last(&mut self, position: usize) -> bool {
        let state = self.state;
        let mut chosen = 0;
        while chosen < 3 && self.range.bit(&mut self.which[chosen][state]) == 1 {
            chosen += 1;
        }
        self.last[..=chosen].rotate_right(1);
        chosen == 0 && self.range.bit(&mut self.is_long[state][position]) == 0
    }

    fn literal(&mut self) {
        let before = usize::from(self.out.last().copied().unwrap_or(0));
        let position = self.out.len() & ((1 << self.literal_bits) - 1);
        let context = position << self.before_bits | before >> (8 - self.before_bits);
        let chances = &mut self.literals[0x300 * context..][..0x300];
        let mut symbol = 1;
        // Behind a copy, the byte that it would have gone on with tells something.
        if self.state >= 7
            && let Some(from) = self.out.len().checked_sub(self.last[0])
        {
            let mut expected = usize::from(self.out[from]);
            while symbol < 0x100 {
                expected <<= 1;
                let guess = expected >> 8 & 1;
                let bit = self.range.bit(&mut chances[(1 + guess) << 8 | symbol]);
                symbol = symbol << 1 | bit;
                if bit != guess {
                    break;
                }
            }
        }
        while symbol < 0x100 {
            symbol = symbol << 1 | self.range.bit(&mut chances[symbol]);
        }
        self.out.push(symbol as u8);
        self.state = match self.state {
            0..4 => 0,
            4..10 => self.state - 3,
            _ => self.state - 6,
        };
    }

    /// The distance of a copy of this length; 2³² ends the stream.
    fn distance(&mut self, length: usize) -> Option<usize> {
        let slot = self.range.tree(&mut self.slots[(length - 2).min(3)]);
        if slot < 4 {
            return Some(slot + 1);
        }
        let n = slot as u32 / 2 - 1;
        let base = (2 | slot & 1) << n;
        let rest = if slot < 14 {
            self.range.reverse_tree(&mut self.low[base - slot..], n)
        } else {
            let high = self.range.even_bits(n - 4) << 4;
            high | self.range.reverse_tree(&mut self.align, 4)
        };
        (!self.range.is_cut).then_some(base + rest + 1)
    }
}
