//! SCRAM: the published vectors, both sides against each other, and what an attacker may send.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use bson::rawdoc;
use halocline_wire::scram::*;
use proptest::prelude::*;

struct Vector {
    mechanism: Mechanism,
    client_nonce: &'static str,
    server_nonce: &'static str,
    salt: &'static str,
    iterations: u32,
    client_final: &'static str,
    server_final: &'static str,
}

/// From the MongoDB driver authentication specification (SHA-1) and RFC 7677 (SHA-256); the user
/// is "user", the password "pencil".
const VECTORS: [Vector; 2] = [
    Vector {
        mechanism: Mechanism::Sha1,
        client_nonce: "fyko+d2lbbFgONRv9qkxdawL",
        server_nonce: "Ho+Vgk7qvUOKUwuWLIWg4l/9SraGMHEE",
        salt: "rQ9ZY3MntBeuP3E1TDVC4w==",
        iterations: 10_000,
        client_final: "c=biws,r=fyko+d2lbbFgONRv9qkxdawLHo+Vgk7qvUOKUwuWLIWg4l/9SraGMHEE,\
                       p=MC2T8BvbmWRckDw8oWl5IVghwCY=",
        server_final: "v=UMWeI25JD1yNYZRMpZ4VHvhZ9e0=",
    },
    Vector {
        mechanism: Mechanism::Sha256,
        client_nonce: "rOprNGfwEbeRWgbNEkqO",
        server_nonce: "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0",
        salt: "W22ZaJ0SNY7soEsUEjb6gQ==",
        iterations: 4096,
        client_final: "c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,\
                       p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=",
        server_final: "v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=",
    },
];

#[test]
fn the_published_vectors_hold_on_both_sides() {
    for vector in VECTORS {
        let credential = ClientCredential::new(vector.mechanism, "user", "pencil").unwrap();
        let client = credential.start_with_nonce(vector.client_nonce.to_owned());
        let first = client.first_message();
        assert_eq!(first, format!("n,,n=user,r={}", vector.client_nonce).as_bytes());

        let salt = BASE64.decode(vector.salt).unwrap();
        let stored =
            StoredCredential::derive(vector.mechanism, "user", "pencil", &salt, vector.iterations)
                .unwrap();
        let start = ServerStart::parse(vector.mechanism, &first).unwrap();
        assert_eq!(start.user(), "user");
        let (challenge, server) = start.challenge_with_nonce(stored, vector.server_nonce).unwrap();
        let (client_final, verifier) = client.respond(&challenge).unwrap();
        assert_eq!(String::from_utf8(client_final.clone()).unwrap(), vector.client_final);
        let server_final = server.finish(&client_final).unwrap();
        assert_eq!(String::from_utf8(server_final.clone()).unwrap(), vector.server_final);
        verifier.verify(&server_final).unwrap();
    }
}

const SALT: &[u8] = b"sixteen byte salt";

/// A whole exchange; what the server and then the client say of it.
fn exchange(
    mechanism: Mechanism,
    user: &str,
    password: &str,
    stored: StoredCredential,
) -> Result<(), ScramError> {
    let credential = ClientCredential::new(mechanism, user, password)?;
    let client = credential.start();
    let start = ServerStart::parse(mechanism, &client.first_message())?;
    assert_eq!(start.user(), user);
    let (challenge, server) = start.challenge(stored)?;
    let (client_final, verifier) = client.respond(&challenge)?;
    verifier.verify(&server.finish(&client_final)?)
}

#[test]
fn only_the_right_password_gets_in() {
    for mechanism in [Mechanism::Sha1, Mechanism::Sha256] {
        for user in ["ann", "a,b=c", "Jürgen", "=2C"] {
            let stored =
                StoredCredential::derive(mechanism, user, "secret", SALT, MIN_ITERATIONS).unwrap();
            assert_eq!(exchange(mechanism, user, "secret", stored.clone()), Ok(()));
            assert_eq!(exchange(mechanism, user, "Secret", stored), Err(ScramError::WrongProof));
            let decoy = StoredCredential::decoy(mechanism, user, b"process secret").unwrap();
            assert_eq!(exchange(mechanism, user, "secret", decoy), Err(ScramError::WrongProof));
        }
    }
}

#[test]
fn passwords_go_through_saslprep_for_sha256_only() {
    // The vectors of the driver specification: U+2168 is "IX", U+00AD vanishes.
    let stored =
        StoredCredential::derive(Mechanism::Sha256, "u", "IX", SALT, MIN_ITERATIONS).unwrap();
    for password in ["IX", "I\u{AD}X", "\u{2168}"] {
        assert_eq!(exchange(Mechanism::Sha256, "u", password, stored.clone()), Ok(()));
    }
    let stored =
        StoredCredential::derive(Mechanism::Sha1, "u", "IX", SALT, MIN_ITERATIONS).unwrap();
    assert_eq!(exchange(Mechanism::Sha1, "u", "\u{2168}", stored), Err(ScramError::WrongProof));
    assert_eq!(
        ClientCredential::new(Mechanism::Sha256, "u", "\u{7}").unwrap_err(),
        ScramError::UnusablePassword
    );
}

#[test]
fn a_decoy_challenges_like_a_user_and_the_same_way_every_time() {
    for mechanism in [Mechanism::Sha1, Mechanism::Sha256] {
        let challenge = |user: &str, secret: &[u8]| {
            let payload = format!("n,,n={user},r=abc");
            let start = ServerStart::parse(mechanism, payload.as_bytes()).unwrap();
            let decoy = StoredCredential::decoy(mechanism, user, secret).unwrap();
            start.challenge_with_nonce(decoy, "def").unwrap().0
        };
        assert_eq!(challenge("x", b"s"), challenge("x", b"s"));
        assert_ne!(challenge("x", b"s"), challenge("y", b"s"));
        assert_ne!(challenge("x", b"s"), challenge("x", b"t"));
    }
}

#[test]
fn stored_credentials_are_read_from_users_info() {
    let stored = |bytes: &[u8]| BASE64.encode(bytes);
    let good = rawdoc! {
        "iterationCount": 15000, "salt": stored(&[1; 28]), "storedKey": stored(&[2; 32]),
        "serverKey": stored(&[3; 32]),
    };
    assert!(StoredCredential::from_document(Mechanism::Sha256, &good).is_ok());
    // Keys of the other mechanism's length.
    assert!(StoredCredential::from_document(Mechanism::Sha1, &good).is_err());
    for bad in [
        rawdoc! {},
        rawdoc! { "iterationCount": 0, "salt": "", "storedKey": stored(&[2; 32]), "serverKey": stored(&[3; 32]) },
        rawdoc! { "iterationCount": 1, "salt": "!", "storedKey": stored(&[2; 32]), "serverKey": stored(&[3; 32]) },
        rawdoc! { "iterationCount": 1, "salt": "", "storedKey": "", "serverKey": stored(&[3; 32]) },
    ] {
        assert!(StoredCredential::from_document(Mechanism::Sha256, &bad).is_err());
    }
}

#[test]
fn first_messages_that_ask_for_more_than_is_offered_are_refused() {
    let kind = |payload: &str| {
        ServerStart::parse(Mechanism::Sha256, payload.as_bytes()).unwrap_err().kind()
    };
    assert_eq!(kind("p=tls-unique,,n=u,r=x"), "unsupported");
    assert_eq!(kind("n,,m=ext,n=u,r=x"), "unsupported");
    assert_eq!(kind("n,a=root,n=u,r=x"), "unsupported");
    for payload in [
        "",
        "n",
        "n,",
        "n,,",
        "n,,n=u",
        "n,,n=,r=x",
        "n,,r=x,n=u",
        "x,,n=u,r=x",
        "n,,n=u,r=",
        "n,,n=u=,r=x",
        "n,,n=u=2,r=x",
        "n,,n=u=2c,r=x",
        "n,,n=u,r=\u{7f}",
        "n,b=u,n=u,r=x",
    ] {
        assert_eq!(kind(payload), "malformed", "{payload:?}");
    }
    assert!(ServerStart::parse(Mechanism::Sha1, b"y,a=u,n=u,r=x,ext=1").is_ok());
    assert!(ServerStart::parse(Mechanism::Sha1, b"n,,n=\xff,r=x").is_err());
    let long = format!("n,,n={},r=x", "u".repeat(10_000));
    assert!(ServerStart::parse(Mechanism::Sha1, long.as_bytes()).is_err());
}

#[test]
fn last_messages_of_another_exchange_are_refused() {
    let stored =
        StoredCredential::derive(Mechanism::Sha256, "u", "p", SALT, MIN_ITERATIONS).unwrap();
    let server = || {
        let start = ServerStart::parse(Mechanism::Sha256, b"n,,n=u,r=abc").unwrap();
        start.challenge_with_nonce(stored.clone(), "def").unwrap().1
    };
    let kind = |payload: &str| server().finish(payload.as_bytes()).unwrap_err().kind();
    assert_eq!(kind("c=biws,r=abcxyz,p=AAAA"), "wrong_nonce");
    assert_eq!(kind("c=biws,r=abc,p=AAAA"), "wrong_nonce");
    assert_eq!(kind("c=eSws,r=abcdef,p=AAAA"), "malformed");
    assert_eq!(kind("c=biws,r=abcdef"), "malformed");
    assert_eq!(kind("c=biws,r=abcdef,p=!"), "malformed");
    assert_eq!(kind(""), "malformed");
    for length in [0, 1, 31, 32, 33, 64] {
        let proof = BASE64.encode(vec![0; length]);
        assert_eq!(kind(&format!("c=biws,r=abcdef,p={proof}")), "wrong_proof");
    }
}

#[test]
fn a_false_server_is_found_out() {
    let credential = ClientCredential::new(Mechanism::Sha256, "u", "p").unwrap();
    let respond = |server_first: &str| {
        credential.start_with_nonce("abc".into()).respond(server_first.as_bytes())
    };
    let kind = |server_first: &str| respond(server_first).unwrap_err().kind();
    assert_eq!(kind("r=abc,s=AAAA,i=4096"), "wrong_nonce");
    assert_eq!(kind("r=xabcd,s=AAAA,i=4096"), "wrong_nonce");
    assert_eq!(kind("r=abcd,s=AAAA,i=4095"), "iterations");
    assert_eq!(kind("r=abcd,s=AAAA,i=1000001"), "iterations");
    assert_eq!(kind("r=abcd,s=AAAA,i=99999999999"), "iterations");
    assert_eq!(kind("r=abcd,s=AAAA,i=-5"), "malformed");
    assert_eq!(kind("r=abcd,s=,i=4096"), "malformed");
    assert_eq!(kind("r=abcd,s=%,i=4096"), "malformed");
    assert_eq!(kind("m=x,r=abcd,s=AAAA,i=4096"), "unsupported");
    assert_eq!(kind("e=other-error"), "refused");
    let (_, verifier) = respond("r=abcd,s=AAAA,i=4096").unwrap();
    let kind = |server_final: &str| verifier.verify(server_final.as_bytes()).unwrap_err().kind();
    assert_eq!(kind(&format!("v={}", BASE64.encode([0; 32]))), "wrong_server");
    assert_eq!(kind("v="), "wrong_server");
    assert_eq!(kind("v=%"), "malformed");
    assert_eq!(kind("e=invalid-proof"), "refused");
    assert_eq!(kind(""), "malformed");
}

#[test]
fn secrets_are_not_shown() {
    let credential = ClientCredential::new(Mechanism::Sha256, "u", "pencil").unwrap();
    let stored =
        StoredCredential::derive(Mechanism::Sha256, "u", "pencil", SALT, MIN_ITERATIONS).unwrap();
    for text in
        [format!("{credential:?}"), format!("{stored:?}"), format!("{:?}", credential.start())]
    {
        assert!(!text.contains("pencil") && !text.contains("key"), "{text}");
    }
}

proptest! {
    #[test]
    fn arbitrary_payloads_are_errors_and_never_panics(payload in ".{0,80}", bytes: Vec<u8>) {
        let credential = ClientCredential::new(Mechanism::Sha1, "u", "p").unwrap();
        let stored = StoredCredential::decoy(Mechanism::Sha1, "u", b"s").unwrap();
        for payload in [payload.as_bytes(), &bytes] {
            prop_assert!(credential.start().respond(payload).is_err());
            let _ = ServerStart::parse(Mechanism::Sha1, payload);
            let start = ServerStart::parse(Mechanism::Sha1, b"n,,n=u,r=x").unwrap();
            let (_, server) = start.challenge(stored.clone()).unwrap();
            prop_assert!(server.finish(payload).is_err());
        }
    }

    #[test]
    fn any_user_name_survives_the_escaping(user in ".{1,40}") {
        let credential = ClientCredential::new(Mechanism::Sha1, &user, "p").unwrap();
        let start = ServerStart::parse(Mechanism::Sha1, &credential.start().first_message()).unwrap();
        prop_assert_eq!(start.user(), user);
    }
}
