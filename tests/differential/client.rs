//! A client that speaks OP_MSG and nothing else: replies come back as the bytes they were. It has its
//! own encoder, so that a mistake of the daemon's cannot hide in a shared one.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use bson::{Document, RawDocumentBuf};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const OP_MSG: i32 = 2013;
const MORE_TO_COME: u32 = 2;
/// Longer than any operation may take; a reply that never comes is a failure, not a hang.
const PATIENCE: Duration = Duration::from_secs(60);

/// One connection.
pub struct Connection {
    stream: TcpStream,
    next: i32,
}

/// A command: its body and, if it has one, a document sequence.
#[derive(Debug, Clone)]
pub struct Message {
    pub body: Document,
    pub sequence: Option<(String, Vec<Document>)>,
}

impl Connection {
    /// Connects; no handshake, which a server does not insist on.
    pub async fn open(address: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, next: 1 })
    }

    /// Sends a command and waits for its reply.
    pub async fn run(&mut self, message: &Message) -> io::Result<RawDocumentBuf> {
        self.send(message, 0).await?;
        let number = self.next;
        let receive = async {
            let mut header = [0; 16];
            self.stream.read_exact(&mut header).await?;
            let [length, _, answers, op_code] = words(&header);
            if op_code != OP_MSG || answers != number {
                return Err(bad(format!("opcode {op_code}, an answer to {answers}, not {number}")));
            }
            let mut rest = vec![0; usize::try_from(length).map_err(io::Error::other)? - 16];
            self.stream.read_exact(&mut rest).await?;
            // Four bytes of flags, one of the section's kind.
            if rest.get(..5) != Some(&[0; 5]) {
                return Err(bad(format!("flags and kind are {:?}", rest.get(..5))));
            }
            RawDocumentBuf::from_bytes(rest.split_off(5)).map_err(io::Error::other)
        };
        tokio::time::timeout(PATIENCE, receive).await?
    }

    /// Sends a command that wants no reply.
    pub async fn tell(&mut self, message: &Message) -> io::Result<()> {
        self.send(message, MORE_TO_COME).await
    }

    async fn send(&mut self, message: &Message, flags: u32) -> io::Result<()> {
        self.next += 1;
        let mut bytes = Vec::new();
        bytes.extend_from_slice(&[0; 4]);
        bytes.extend_from_slice(&self.next.to_le_bytes());
        bytes.extend_from_slice(&0_i32.to_le_bytes());
        bytes.extend_from_slice(&OP_MSG.to_le_bytes());
        bytes.extend_from_slice(&flags.to_le_bytes());
        bytes.push(0);
        bytes.extend(encoded(&message.body));
        if let Some((name, documents)) = &message.sequence {
            let mut section = vec![0; 4];
            section.extend_from_slice(name.as_bytes());
            section.push(0);
            for document in documents {
                section.extend(encoded(document));
            }
            set_length(&mut section);
            bytes.push(1);
            bytes.extend(section);
        }
        set_length(&mut bytes);
        self.stream.write_all(&bytes).await
    }
}

/// A document's bytes.
pub fn encoded(document: &Document) -> Vec<u8> {
    document.to_vec().unwrap()
}

fn set_length(bytes: &mut [u8]) {
    let length = i32::try_from(bytes.len()).unwrap().to_le_bytes();
    bytes[..4].copy_from_slice(&length);
}

fn words(header: &[u8; 16]) -> [i32; 4] {
    std::array::from_fn(|i| i32::from_le_bytes(header[i * 4..i * 4 + 4].try_into().unwrap()))
}

fn bad(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
