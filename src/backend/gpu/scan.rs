//! Scans with a decay a head, or a channel and state (`kernels/scan.cu`). Twins: `Cpu::scan`,
//! `Cpu::selective_scan` and what `forward::recurrent` does around them, to the bit. The state
//! stays in device memory.

use super::{DevicePtr, DeviceSlice, Grid, Stream, kernel_params, kernels, u32_of};
use crate::Result;
use crate::backend::ops::{Columns, ScanShape};

const WARP: usize = 32;
/// A warp loads the queries and keys of so many tokens at once.
const STAGED: usize = 8;
/// Channels of a block of a selective scan.
const CHANNELS: usize = 64;

kernel_params! {
    pub struct ScanParams[120] {
        rows: DevicePtr,
        steps: DevicePtr,
        step_bias: DevicePtr,
        log_decay: DevicePtr,
        skip: DevicePtr,
        gate: DevicePtr,
        state: DevicePtr,
        out: DevicePtr,
        width: u32,
        q_first: u32,
        q_step: u32,
        k_first: u32,
        k_step: u32,
        v_first: u32,
        v_step: u32,
        gate_stride: u32,
        tokens: u32,
        n_heads: u32,
        n_groups: u32,
        k_dim: u32,
        v_dim: u32,
        silu: u32,
    }
}

kernel_params! {
    pub struct SelectiveScanParams[96] {
        x: DevicePtr,
        steps: DevicePtr,
        rows: DevicePtr,
        log_decay: DevicePtr,
        skip: DevicePtr,
        gate: DevicePtr,
        state: DevicePtr,
        out: DevicePtr,
        width: u32,
        input: u32,
        output: u32,
        gate_stride: u32,
        tokens: u32,
        channels: u32,
        n_states: u32,
        unused: u32,
    }
}

kernels! {
    pub struct Scanner {
        scan: ScanParams = "scan",
        selective: SelectiveScanParams = "selective_scan",
    }
}

/// A scan's inputs besides its state, see `ops::Scan`. All are f32.
#[derive(Clone, Copy)]
pub struct DeviceScan<'a> {
    pub shape: ScanShape,
    /// [tokens, width]: rows with queries, keys and values in these columns.
    pub rows: DeviceSlice<'a>,
    pub width: usize,
    pub q: Columns,
    pub k: Columns,
    pub v: Columns,
    /// Queries, keys and values become their silu before they are read.
    pub silu: bool,
    /// Without it steps are 1, and the output has no gate.
    pub steps: Option<DeviceSteps<'a>>,
    /// The logarithm of a head's decay, for a step of 1: `[n_heads]`.
    pub log_decay: DeviceSlice<'a>,
    /// Factor on a head's values, which are added to its output: `[n_heads]`.
    pub skip: Option<DeviceSlice<'a>>,
}

/// Rows with the output's gate and the steps: out = silu(gate) ⊙ scan, step = softplus(x + bias).
#[derive(Clone, Copy)]
pub struct DeviceSteps<'a> {
    /// [tokens, stride], whose first columns are the gate, [n_heads, v_dim].
    pub rows: DeviceSlice<'a>,
    pub stride: usize,
    /// The column of the first head's step.
    pub first: usize,
    /// `[n_heads]`
    pub bias: DeviceSlice<'a>,
}

/// The inputs of a selective scan besides its state, see `cpu::scan::Selective`. All are f32.
#[derive(Clone, Copy)]
pub struct DeviceSelective<'a> {
    /// [tokens, channels]
    pub x: DeviceSlice<'a>,
    /// Steps are softplus of these: [tokens, channels].
    pub steps: DeviceSlice<'a>,
    /// [tokens, width]: `n_states` columns from `input` on are put into the states, those from
    /// `output` on read them.
    pub rows: DeviceSlice<'a>,
    pub width: usize,
    pub input: usize,
    pub output: usize,
    pub n_states: usize,
    /// [n_states, channels]
    pub log_decay: DeviceSlice<'a>,
    /// `[channels]`
    pub skip: DeviceSlice<'a>,
    /// [tokens, gate_stride]: the output is multiplied by the silu of the columns from `gate_first`
    /// on.
    pub gate: DeviceSlice<'a>,
    pub gate_stride: usize,
    pub gate_first: usize,
}

/// The bytes of shared memory that a block takes for keys of `k_dim` elements.
fn shared_bytes(k_dim: usize) -> usize {
    4 * k_dim * (WARP + 2 * STAGED)
}

impl Scanner {
    /// The scan of `scan` from `state` f32 [n_heads, k_dim, v_dim] on, which it changes, into `out`
    /// f32 [tokens, n_heads, v_dim].
    ///
    /// # Panics
    /// If sizes do not fit each other or 32 columns of a head's state do not fit a block's shared
    /// memory.
    pub fn launch(
        &self,
        stream: &Stream,
        scan: &DeviceScan,
        state: DeviceSlice,
        out: DeviceSlice,
    ) -> Result<()> {
        let ScanShape { n_heads, n_groups, k_dim, v_dim } = scan.shape;
        let tokens = assert_fits(scan, state, out);
        let most = stream.gpu().info().shared_bytes_max as usize;
        assert!(shared_bytes(k_dim) <= most, "a block has {most} bytes of shared memory");
        if tokens == 0 {
            return Ok(());
        }
        let params = ScanParams {
            rows: scan.rows.into(),
            log_decay: scan.log_decay.into(),
            skip: scan.skip.into(),
            state: state.into(),
            out: out.into(),
            width: u32_of(scan.width),
            q_first: u32_of(scan.q.first),
            q_step: u32_of(scan.q.step),
            k_first: u32_of(scan.k.first),
            k_step: u32_of(scan.k.step),
            v_first: u32_of(scan.v.first),
            v_step: u32_of(scan.v.step),
            tokens: u32_of(tokens),
            n_heads: u32_of(n_heads),
            n_groups: u32_of(n_groups),
            k_dim: u32_of(k_dim),
            v_dim: u32_of(v_dim),
            silu: scan.silu.into(),
            ..Default::default()
        };
        let params = match &scan.steps {
            None => params,
            Some(steps) => ScanParams {
                steps: steps.rows.slice(4 * steps.first..steps.rows.len()).into(),
                step_bias: steps.bias.into(),
                gate: steps.rows.into(),
                gate_stride: u32_of(steps.stride),
                ..params
            },
        };
        let blocks = [u32_of(v_dim.div_ceil(WARP)), params.n_heads, 1];
        let grid = Grid::new(blocks, WARP as u32).with_shared(shared_bytes(k_dim));
        // SAFETY: sizes are asserted.
        unsafe { stream.launch(self.scan, grid, &params) }
    }

    /// A selective scan from `state` f32 [n_states, channels] on, which it changes, into `out` f32
    /// [tokens, channels].
    ///
    /// # Panics
    /// If sizes do not fit each other or the states of 64 channels do not fit a block's shared
    /// memory.
    pub fn selective(
        &self,
        stream: &Stream,
        scan: &DeviceSelective,
        state: DeviceSlice,
        out: DeviceSlice,
    ) -> Result<()> {
        let (channels, n_states) = (scan.skip.count::<f32>(), scan.n_states);
        let n = scan.x.count::<f32>();
        assert!(n.is_multiple_of(channels), "{n} in rows of {channels}");
        let tokens = n / channels;
        assert_eq!([scan.steps, out].map(DeviceSlice::count::<f32>), [n; 2]);
        assert_eq!(
            [scan.log_decay, state].map(DeviceSlice::count::<f32>),
            [n_states * channels; 2]
        );
        let counts = [scan.rows, scan.gate].map(DeviceSlice::count::<f32>);
        assert_eq!(counts, [tokens * scan.width, tokens * scan.gate_stride]);
        let end = scan.input.max(scan.output) + n_states;
        let gate_end = scan.gate_first + channels;
        assert!(end <= scan.width && gate_end <= scan.gate_stride, "columns of rows");
        let most = stream.gpu().info().shared_bytes_max as usize;
        let shared_bytes = 4 * n_states * 2 * (CHANNELS + STAGED);
        assert!(shared_bytes <= most, "a block has {most} bytes of shared memory");
        if tokens == 0 {
            return Ok(());
        }
        let params = SelectiveScanParams {
            x: scan.x.into(),
            steps: scan.steps.into(),
            rows: scan.rows.into(),
            log_decay: scan.log_decay.into(),
            skip: scan.skip.into(),
            gate: scan.gate.slice(4 * scan.gate_first..scan.gate.len()).into(),
            state: state.into(),
            out: out.into(),
            width: u32_of(scan.width),
            input: u32_of(scan.input),
            output: u32_of(scan.output),
            gate_stride: u32_of(scan.gate_stride),
            tokens: u32_of(tokens),
            channels: u32_of(channels),
            n_states: u32_of(n_states),
            unused: 0,
        };
        let grid = Grid::each(channels, CHANNELS as u32).with_shared(shared_bytes);
        // SAFETY: sizes are asserted.
        unsafe { stream.launch(self.selective, grid, &params) }
    }
}

/// Asserts that sizes fit each other. Returns the number of tokens.
fn assert_fits(scan: &DeviceScan, state: DeviceSlice, out: DeviceSlice) -> usize {
    let ScanShape { n_heads, n_groups, k_dim, v_dim } = scan.shape;
    let all = scan.rows.count::<f32>();
    assert!(all.is_multiple_of(scan.width), "{all} in rows of {}", scan.width);
    assert!(n_heads.is_multiple_of(n_groups), "{n_heads} heads in {n_groups} groups");
    let tokens = all / scan.width;
    for (columns, n, dim) in
        [(scan.q, n_groups, k_dim), (scan.k, n_groups, k_dim), (scan.v, n_heads, v_dim)]
    {
        let end = columns.first + (n - 1) * columns.step + dim;
        assert!(end <= scan.width, "heads up to column {end} of {}", scan.width);
    }
    assert_eq!(state.count::<f32>(), scan.shape.n_state());
    assert_eq!(out.count::<f32>(), tokens * scan.shape.width());
    assert_eq!(scan.log_decay.count::<f32>(), n_heads);
    assert!(scan.skip.is_none_or(|skip| skip.count::<f32>() == n_heads), "a factor a head");
    if let Some(steps) = &scan.steps {
        assert_eq!(steps.rows.count::<f32>(), tokens * steps.stride);
        let is_gated = scan.shape.width() <= steps.first;
        assert!(is_gated && steps.first + n_heads <= steps.stride, "a gate and then steps");
        assert_eq!(steps.bias.count::<f32>(), n_heads);
    }
    tokens
}
