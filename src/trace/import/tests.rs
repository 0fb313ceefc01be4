use super::*;
use crate::trace::format::{Trace, UNKNOWN_TOKEN};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use std::io::Write as _;

/// An array as NumPy writes it.
fn npy(descr: &str, shape: &str, data: &[u8]) -> Vec<u8> {
    let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n");
    let mut out = npy::MAGIC.to_vec();
    out.extend([1, 0]);
    out.extend((header.len() as u16).to_le_bytes());
    out.extend(header.as_bytes());
    out.extend(data);
    out
}

/// An archive of these files, the first stored and the others deflated.
fn archive(files: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let (mut out, mut central): (Vec<u8>, Vec<u8>) = (Vec::new(), Vec::new());
    for (i, (name, raw)) in files.iter().enumerate() {
        let mut encoder = flate2::write::DeflateEncoder::new(Vec::new(), Default::default());
        encoder.write_all(raw).unwrap();
        let deflated = encoder.finish().unwrap();
        let (method, packed) = if i == 0 { (0_u16, raw) } else { (8, &deflated) };
        let name = format!("{name}.npy");
        // The version, flags, method, time, checksum, both sizes, and lengths of names.
        let mut fields: Vec<u8> = vec![20, 0, 0, 0];
        fields.extend(method.to_le_bytes());
        fields.extend([0; 4]);
        fields.extend(crc32fast::hash(raw).to_le_bytes());
        fields.extend((packed.len() as u32).to_le_bytes());
        fields.extend((raw.len() as u32).to_le_bytes());
        fields.extend((name.len() as u16).to_le_bytes());
        fields.extend([0, 0]);
        central.extend(b"PK\x01\x02\x14\x00");
        central.extend(&fields);
        central.extend([0; 10]);
        central.extend((out.len() as u32).to_le_bytes());
        central.extend(name.as_bytes());
        out.extend(zip::MAGIC);
        out.extend(&fields);
        out.extend(name.as_bytes());
        out.extend(packed);
    }
    let at = out.len() as u32;
    out.extend(&central);
    out.extend(b"PK\x05\x06\x00\x00\x00\x00");
    out.extend([(files.len() as u16).to_le_bytes(); 2].concat());
    out.extend((central.len() as u32).to_le_bytes());
    out.extend(at.to_le_bytes());
    out.extend([0, 0]);
    out
}

fn source(bytes: &[u8]) -> std::result::Result<Source, String> {
    let Fault { place, expected, got } = match decode(bytes, "text") {
        Ok(source) => return Ok(Source { path: "in".into(), ..source }),
        Err(fault) => fault,
    };
    Err(format!("{place}: expected {expected}, got {got}"))
}

fn imported(
    bytes: &[u8],
    n_experts: Option<usize>,
) -> std::result::Result<(Trace, Summary), String> {
    let source = source(bytes)?;
    let (out, summary) = write(&[source], n_experts, Vec::new()).map_err(|e| e.to_string())?;
    Ok((Trace::decode(&out, Path::new("out")).unwrap(), summary))
}

/// Each token's experts in the layers that have some.
fn chosen(trace: &Trace) -> Vec<Vec<u32>> {
    let of = |token| trace.header().moe_layers().flat_map(move |l| trace.chosen(token, l)).copied();
    (0..trace.n_tokens()).map(|token| of(token).collect()).collect()
}

/// Tokens and prompt tokens of each request.
fn lengths(trace: &Trace) -> Vec<(usize, usize)> {
    trace.requests().iter().map(|r| (r.tokens.len(), r.n_prompt)).collect()
}

fn utf32(text: &str) -> Vec<u8> {
    text.chars().flat_map(|c| (c as u32).to_le_bytes()).collect()
}

#[test]
fn an_archive_has_requests_weights_and_ids() {
    let ids = npy("|u1", "(3, 2, 2)", &[1, 0, 2, 3, 0, 1, 3, 2, 1, 2, 0, 3]);
    // 0.75 and 0.25, as f16.
    let weights = npy("<f2", "(3, 2, 2)", &[0x00_u8, 0x3a, 0x00, 0x34].repeat(6));
    let meta = utf32("{\"model\": \"Some\"}");
    let kinds = utf32("[\"a\", \"b\"]");
    let files = [
        ("ids", ids),
        ("weights", weights),
        ("starts", npy("<i4", "(2,)", &[0, 0, 0, 0, 2, 0, 0, 0])),
        ("experts", npy("<i4", "()", &[5, 0, 0, 0])),
        ("tokens", npy("<u4", "(3,)", &[7, 0, 0, 0, 9, 1, 0, 0, 7, 0, 0, 0])),
        ("prompt", npy("|b1", "(3,)", &[1, 0, 0])),
        ("meta", npy(&format!("<U{}", meta.len() / 4), "()", &meta)),
        ("kinds", npy(&format!("<U{}", kinds.len() / 4), "()", &kinds)),
    ];
    let (trace, summary) = imported(&archive(&files), None).unwrap();
    assert_eq!(chosen(&trace), [[1, 0, 2, 3], [0, 1, 3, 2], [1, 2, 0, 3]]);
    assert_eq!(lengths(&trace), [(2, 1), (1, 0)]);
    let header = trace.header();
    assert_eq!((&*header.model, header.k, header.layers[0].n_experts), ("Some", 2, 5));
    assert_eq!((0..3).map(|t| trace.token_id(t)).collect::<Vec<_>>(), [7, 265, 7]);
    let kinds: Vec<&str> = trace.requests().iter().map(|request| &*request.kind).collect();
    assert_eq!(kinds, ["a", "b"]);
    assert!(summary.has_weights && !summary.experts_are_guessed);
    let mut probs = Vec::new();
    trace.probs(0, 0, &mut probs);
    let expected = [0.25, 0.75, 0.0, 0.0, 0.0];
    let is_near = probs.iter().zip(expected).all(|(p, q)| (p - q).abs() < 0.01);
    assert!(is_near && probs.len() == 5, "{probs:?}");
}

/// An array as vLLM's clients save it; the first layer has no router.
#[test]
fn an_array_is_a_request() {
    let ids: Vec<u8> =
        [0, 0, 3, 1, 0, 0, 2, 0].iter().flat_map(|id: &i32| id.to_le_bytes()).collect();
    let (trace, summary) = imported(&npy("<i4", "(2, 2, 2)", &ids), Some(8)).unwrap();
    assert_eq!(chosen(&trace), [[3, 1], [2, 0]]);
    assert_eq!(trace.header().moe_layers().collect::<Vec<_>>(), [1]);
    assert_eq!((lengths(&trace), summary.has_weights), (vec![(2, 0)], false));
    assert_eq!((trace.header().layers[1].n_experts, trace.token_id(0)), (8, UNKNOWN_TOKEN));
    let mut probs = vec![1.0];
    trace.probs(0, 1, &mut probs);
    assert!(probs.is_empty());
}

#[test]
fn lines_of_json_are_tokens() {
    let text = "{\"tok\": \"a\", \"layers\": [[1, 0], []]}\n\
                {\"tok\": \"b\", \"layers\": [[3, 2], []]}\n\n\
                {\"tok\": \"a\", \"layers\": [[0, 1], []], \"request\": 2}\n";
    let (trace, summary) = imported(text.as_bytes(), None).unwrap();
    assert_eq!(chosen(&trace), [[1, 0], [3, 2], [0, 1]]);
    assert_eq!((0..3).map(|t| trace.token_id(t)).collect::<Vec<_>>(), [0, 1, 0]);
    assert_eq!(lengths(&trace), [(2, 0), (1, 0)]);
    assert_eq!((summary.n_experts, summary.experts_are_guessed), (4, true));
}

/// Responses with `routed_experts` in each of its forms.
#[test]
fn responses_of_vllm_are_requests() {
    let array = npy("|u1", "(3, 1, 2)", &[1, 0, 2, 3, 0, 1]);
    let (array, raw) = (STANDARD.encode(array), STANDARD.encode([1, 0, 2, 3, 0, 1]));
    let forms = [
        format!("{:?}", array),
        "[[[1, 0]], [[2, 3]], [[0, 1]]]".into(),
        format!("{{\"data\": {raw:?}, \"shape\": [3, 1, 2], \"dtype\": \"uint8\", \"start\": 0}}"),
    ];
    for form in forms {
        let counted = format!(
            "{{\"choices\": [{{\"routed_experts\": {form}}}], \"usage\": {{\"prompt_tokens\": 2}}}}"
        );
        let (trace, _) = imported(counted.as_bytes(), None).unwrap();
        assert_eq!(
            (chosen(&trace).concat(), lengths(&trace)),
            (vec![1, 0, 2, 3, 0, 1], vec![(3, 2)])
        );
        let listed = format!(
            "{{\"prompt_token_ids\": [5],\n \"token_ids\": [6, 7, 8],\n \
             \"routed_experts\": {form}}}"
        );
        let (trace, _) = imported(listed.as_bytes(), None).unwrap();
        assert_eq!((0..3).map(|t| trace.token_id(t)).collect::<Vec<_>>(), [5, 6, 7]);
        assert_eq!(lengths(&trace), [(3, 1)]);
    }
}

/// A prompt of two tokens, whose last layer computes the second alone, and two decoded tokens; then
/// another turn.
#[test]
fn columns_are_found_by_name() {
    let text = "# route_trace v1\n# model=x n_layer=4 n_expert=16\n\
                turn,phase,step,layer,slot,expert,weight\r\n\
                0,0,0,1,0,9,0.6\n0,0,0,1,1,4,0.4\n0,0,1,1,0,2,0.7\n0,0,1,1,1,3,0.3\n\
                0,0,1,3,0,5,0.5\n0,0,1,3,1,6,0.5\n\
                0,1,2,1,0,1,0.5\n0,1,2,1,1,0,0.5\n0,1,2,3,0,7,0.9\n0,1,2,3,1,8,0.1\n\
                1,1,0,1,0,2,0.5\n1,1,0,1,1,0,0.5\n1,1,0,3,0,7,0.9\n1,1,0,3,1,9,0.1\n";
    let (trace, summary) = imported(text.as_bytes(), None).unwrap();
    assert_eq!(chosen(&trace), [[2, 3, 5, 6], [1, 0, 7, 8], [2, 0, 7, 9]]);
    assert_eq!((lengths(&trace), summary.n_left_out), (vec![(2, 1), (1, 0)], 1));
    assert_eq!((trace.header().layers[3].n_experts, summary.has_weights), (16, true));
    // One weight that is unknown makes all so.
    let (trace, summary) = imported(text.replace("0.9", "nan").as_bytes(), None).unwrap();
    assert!(trace.header().ids_only && !summary.has_weights);
}

/// llama.cpp's `moe-trace`: a prompt of two tokens and two decoded ones, with two experts each.
#[test]
fn tokens_are_told_apart_by_their_layers() {
    let prompt = "0,1\n0,2\n0,3\n0,4\n1,5\n1,6\n";
    let decode = "0,1\n0,3\n1,5\n1,7\n0,2\n0,1\n1,6\n1,5\n";
    for header in ["layer,expert\n", ""] {
        let text = format!("{header}{prompt}{decode}");
        let (trace, summary) = imported(text.as_bytes(), None).unwrap();
        assert_eq!(chosen(&trace), [[3, 4, 5, 6], [1, 3, 5, 7], [2, 1, 6, 5]]);
        assert_eq!((lengths(&trace), summary.n_left_out), (vec![(3, 1)], 1));
    }
}

#[test]
fn what_is_malformed_is_named_by_line_or_array() {
    let ids = || npy("|u1", "(1, 1, 2)", &[0, 1]);
    let with = |name, array| archive(&[("ids", ids()), (name, array)]);
    let mut damaged = archive(&[("ids", ids())]);
    let at = damaged.windows(2).position(|two| two == [0, 1]).unwrap();
    damaged[at] = 9;
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (b"".into(), "the file: expected routing"),
        (b"\xff\xfe".into(), "byte 0: expected UTF-8"),
        (b"PK\x03\x04".into(), "the archive: expected a whole zip file"),
        (archive(&[("ids", ids())])[..90].into(), "the archive: expected a whole zip file"),
        (archive(&[("weights", ids())]), "an array ids or routed_experts, got weights"),
        (with("starts", npy("|u1", "(1,)", &[1])), "starts: expected the first token"),
        (with("weights", npy("<f4", "(1,)", &[0; 4])), "weights: expected fractions of shape"),
        (with("tokens", npy("|u1", "(2,)", &[0; 2])), "tokens: expected a whole number for each"),
        (npy("|u1", "(1, 2)", &[0, 1]), "the array: expected expert numbers [tokens, layers, k]"),
        (npy("|u1", "(9, 1, 2)", &[0, 1]), "the array: expected [9, 1, 2] values"),
        (npy(">i4", "(1, 1, 1)", &[0; 4]), "type \">i4\""),
        (npy("|i1", "(1, 1, 2)", &[255, 1]), "token 0: expected expert numbers from 0"),
        (npy::MAGIC.into(), "the array: expected an array of NumPy"),
        (b"{\"layers\": [[0, 1]]}\n{\"layers\": [0]}".into(), "line 2: expected layers"),
        (b"{\"layers\": [[0, 1]]}\n{\"layers\": [".into(), "line 2: expected a JSON value"),
        (b"{\"a\": 1}".into(), "an object with layers or routed_experts, got a"),
        (b"{\"routed_experts\": \"?\"}".into(), "line 1, routed_experts: expected base64"),
        (b"{\"routed_experts\": [[1], [2]]}".into(), "lists of expert numbers"),
        (b"a,b\n1,2\n".into(), "line 1: expected names of columns with layer and expert"),
        (b"layer,expert\n0,x\n".into(), "line 2: expected an expert, got x"),
        (b"layer,expert\n0\n".into(), "line 2: expected column 2, got none"),
        (b"layer,expert,phase\n0,1,odd\n".into(), "line 2: expected prefill or decode"),
        (b"0,1\n0,2\n0,3\n1,4\n1,5\n".into(), "line 1: expected 2 experts for each token"),
        (
            b"layer,expert,step\n0,1,0\n0,2,0\n0,3,1\n".into(),
            "line 4: expected 2 experts of layer 0",
        ),
        (b"layer,expert,step\n0,1,0\n0,1,0\n".into(), "line 2: expected distinct experts below 2"),
        (b"layer,expert\n".into(), "the file: expected experts of tokens, got none"),
        (damaged, "ids.npy: expected a file as NumPy packs it"),
    ];
    for (bytes, expected) in cases {
        let why = imported(&bytes, None).err().unwrap_or_default();
        assert!(why.contains(expected), "{expected}: {why}");
    }
    let why = imported(b"{\"layers\": [[0, 9]]}", Some(4)).unwrap_err();
    assert!(why.contains("in: line 1: expected distinct experts below 4"), "{why}");
}

#[test]
fn files_of_one_trace_have_one_shape() {
    let one = source(b"{\"layers\": [[0, 1], [1, 2]]}").unwrap();
    let other = source(b"{\"layers\": [[0, 1]]}").unwrap();
    let (out, summary) = write(&[one.clone(), one.clone()], None, Vec::new()).unwrap();
    assert_eq!((summary.n_requests, summary.n_tokens), (2, 2));
    assert_eq!(Trace::decode(&out, Path::new("out")).unwrap().requests().len(), 2);
    let why = write(&[one, other], None, Vec::new()).unwrap_err().to_string();
    assert!(why.contains("2 layers of 2 with experts as in the files before, got 1"), "{why}");
}
